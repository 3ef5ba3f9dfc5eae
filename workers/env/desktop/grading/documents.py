"""What documents say, read from their files: text documents, spreadsheets and pictures.

OpenDocument files may be packed (.odt, .ods) or flat (.fodt, .fods). A file that cannot be read raises ValueError.
"""

from __future__ import annotations

import csv
import io
import zipfile
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image

MOST_BYTES = 32 << 20
_OFFICE = "urn:oasis:names:tc:opendocument:xmlns:"
_TEXT, _TABLE, _STYLE = f"{{{_OFFICE}text:1.0}}", f"{{{_OFFICE}table:1.0}}", f"{{{_OFFICE}style:1.0}}"
_VALUE = f"{{{_OFFICE}office:1.0}}"
_WEIGHT = "{urn:oasis:names:tc:opendocument:xmlns:xsl-fo-compatible:1.0}font-weight"
MOST_CELLS = 100


def _tree(path: Path) -> ElementTree.Element:
    """The document's content. The XML library refuses entities that grow without bound."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path.name} has more than {MOST_BYTES} bytes")
    try:
        if not zipfile.is_zipfile(path):
            return ElementTree.fromstring(path.read_bytes())
        with zipfile.ZipFile(path) as packed:
            if packed.getinfo("content.xml").file_size > MOST_BYTES:
                raise ValueError(f"{path.name} unpacks to more than {MOST_BYTES} bytes")
            return ElementTree.fromstring(packed.read("content.xml"))
    except (ElementTree.ParseError, zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path.name} is not an OpenDocument file: {error}") from None


def paragraphs(path: Path) -> list[str]:
    """The text of every paragraph and heading."""
    wanted = (f"{_TEXT}p", f"{_TEXT}h")
    return [_text(one) for one in _tree(path).iter() if one.tag in wanted]


def bold_texts(path: Path) -> list[str]:
    """The runs of text, and whole paragraphs, whose own style is bold."""
    tree = _tree(path)
    bold = {
        style.get(f"{_STYLE}name")
        for style in tree.iter(f"{_STYLE}style")
        if any(one.get(_WEIGHT) == "bold" for one in style.iter(f"{_STYLE}text-properties"))
    }
    tags = (f"{_TEXT}span", f"{_TEXT}p", f"{_TEXT}h")
    return [_text(one) for one in tree.iter() if one.tag in tags and one.get(f"{_TEXT}style-name") in bold]


def cells(path: Path) -> list[list[str]]:
    """The first sheet's values, row by row, up to 100 × 100; formulas give their results."""
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8", errors="replace") as opened:
            return [row[:MOST_CELLS] for _, row in zip(range(MOST_CELLS), csv.reader(opened), strict=False)]
    table = _tree(path).find(f".//{_TABLE}table")
    rows: list[list[str]] = []
    for row in () if table is None else table.iter(f"{_TABLE}table-row"):
        values: list[str] = []
        for cell in row.iter(f"{_TABLE}table-cell"):
            value = cell.get(f"{_VALUE}value") or "\n".join(_text(one) for one in cell.iter(f"{_TEXT}p"))
            values += [value] * min(int(cell.get(f"{_TABLE}number-columns-repeated", "1")), MOST_CELLS)
        repeated = min(int(row.get(f"{_TABLE}number-rows-repeated", "1")), MOST_CELLS)
        rows += [values[:MOST_CELLS]] * repeated
    return rows[:MOST_CELLS]


def cell(path: Path, name: str) -> str:
    """The value of a cell, named as in "B3"; empty if it is outside the sheet."""
    letters = name.rstrip("0123456789")
    column = 0
    for letter in letters.upper():
        column = 26 * column + ord(letter) - ord("A") + 1
    row, found = int(name[len(letters) :]), cells(path)
    return found[row - 1][column - 1] if row <= len(found) and column <= len(found[row - 1]) else ""


def picture(path: Path) -> Image.Image:
    """An RGB picture. Raises ValueError for any other file, and for a very large one."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path.name} has more than {MOST_BYTES} bytes")
    try:
        with Image.open(io.BytesIO(path.read_bytes())) as opened:
            if opened.width * opened.height > 1 << 24:
                raise ValueError(f"{path.name} has {opened.width} x {opened.height} pixels, too many")
            return opened.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path.name} is not a picture: {error}") from None


def _text(element: ElementTree.Element) -> str:
    """Its text, with `text:s` as the spaces and `text:tab` as the tab that it stands for."""
    parts = [element.text or ""]
    for child in element:
        if child.tag == f"{_TEXT}s":
            parts.append(" " * int(child.get(f"{_TEXT}c", "1")))
        elif child.tag == f"{_TEXT}tab":
            parts.append("\t")
        else:
            parts.append(_text(child))
        parts.append(child.tail or "")
    return "".join(parts)
