"""Pages of the documentation that are made from sources, for mkdocs: the protocol, SECURITY.md and CONTRIBUTING.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DESCRIPTORS = ROOT / "build" / "protocol.binpb"
"""The compiled .proto files with their comments; `make docs` makes it."""
FROM_ELSEWHERE = {"security.md": "SECURITY.md", "contributing.md": "CONTRIBUTING.md"}
RESULTS = "benchmarks/results/"
PICTURES = tuple(f"learning/{path.name}" for path in sorted((ROOT / RESULTS / "learning").glob("*.png")))
"""Below RESULTS; on the site they lie beside the pages, `learning/x.png` as `learning-x.png`."""
_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}
Comments = Mapping[tuple[int, ...], str]


def on_files(files: Files, config: Any) -> Files:
    pages = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in FROM_ELSEWHERE.items()}
    for page, text in {**pages, "protocol.md": protocol()}.items():
        files.append(File.generated(config, page, content=text))
    for picture in PICTURES:
        files.append(File.generated(config, _flat(picture), abs_src_path=str(ROOT / RESULTS / picture)))
    return files


def _flat(picture: str) -> str:
    return picture.replace("/", "-")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links that leave docs/ in the repository lead to the pages made here."""
    for page, source in FROM_ELSEWHERE.items():
        markdown = markdown.replace(f"](../{source})", f"]({page})").replace(f"]({source})", f"]({page})")
    markdown = re.sub(rf"\]\(\.\./{RESULTS}([a-z_/]+\.png)\)", lambda found: f"]({_flat(found[1])})", markdown)
    return markdown.replace("](docs/", "](")


def protocol() -> str:
    """Every service, message and enumeration with its comments."""
    read = FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())
    lines = [
        "# Protocol", "",
        "Made from `proto/dart/v1/*.proto`. [Workers and clients in other languages](clients.md) says how to use it.",
    ]  # fmt: skip
    order = ("session", "control")
    for file in sorted(
        read.file, key=lambda one: (not one.name.endswith(tuple(f"{name}.proto" for name in order)), one.name)
    ):
        if file.name.startswith("dart/"):
            lines += _file(file)
    return "\n".join(lines) + "\n"


def _file(file: FileDescriptorProto) -> Iterator[str]:
    comments = {tuple(one.path): one.leading_comments.strip() for one in file.source_code_info.location}
    yield from ("", f"## {file.name}")
    for number, service in enumerate(file.service):
        yield from ("", f"### {service.name}", "", comments.get((6, number), ""))
        for place, method in enumerate(service.method):
            streams = ("stream " if method.client_streaming else "", "stream " if method.server_streaming else "")
            told = comments.get((6, number, 2, place), "").replace("\n", " ")
            call = (
                f"`{method.name}({streams[0]}{_short(method.input_type)}) → {streams[1]}{_short(method.output_type)}`"
            )
            yield f"\n- {call} {told}"
    for number, message in enumerate(file.message_type):
        yield from _message(message, (4, number), comments)
    for number, enumeration in enumerate(file.enum_type):
        yield from _enumeration(enumeration, (5, number), comments)


def _message(message: DescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    if message.options.map_entry:
        return
    yield from ("", f"### {message.name}", "", comments.get(path, ""), "")
    if message.field:
        yield from ("| field | type | |", "|---|---|---|")
    maps = {one.name: one for one in message.nested_type if one.options.map_entry}
    for number, field in enumerate(message.field):
        told = comments.get((*path, 2, number), "").replace("\n", " ").replace("|", "\\|")
        yield f"| `{field.name}` | {_type(field, maps)} | {told} |"
    for number, nested in enumerate(message.nested_type):
        yield from _message(nested, (*path, 3, number), comments)
    for number, enumeration in enumerate(message.enum_type):
        yield from _enumeration(enumeration, (*path, 4, number), comments)


def _enumeration(enumeration: EnumDescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield from ("", f"### {enumeration.name}", "", comments.get(path, ""), "", "| value | |", "|---|---|")
    for number, value in enumerate(enumeration.value):
        told = comments.get((*path, 2, number), "").replace("\n", " ")
        yield f"| `{value.name}` = {value.number} | {told} |"


def _type(field: FieldDescriptorProto, maps: Mapping[str, DescriptorProto]) -> str:
    name = _short(field.type_name)
    if name in maps:
        key, value = maps[name].field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    of = f"[{name}](#{name.lower()})" if field.type_name.startswith(".dart.") else _SCALARS[field.type]
    return f"list of {of}" if field.label == FieldDescriptorProto.LABEL_REPEATED else of


def _short(name: str) -> str:
    return name.rpartition(".")[2]
