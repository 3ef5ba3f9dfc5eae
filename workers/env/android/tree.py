"""The accessibility tree of `uiautomator dump`, as text: a line for each element that says or does something. Pure."""

from __future__ import annotations

from xml.etree import ElementTree

MOST_XML = 4 << 20
"""Characters of XML that are read. Expat itself refuses entities that expand without end."""
_STATES = ("clickable", "long-clickable", "scrollable", "checkable", "checked", "focused", "selected", "password")


def text_of(xml: str) -> str:
    """One line for each element: class, text, description, identifier, its box in pixels, what it can do.

    Elements are indented by their depth. Empty if the text is not such a tree.
    """
    start = xml.find("<hierarchy")
    if start < 0 or len(xml) > MOST_XML:
        return ""
    try:
        root = ElementTree.fromstring(xml[start : xml.rindex(">") + 1])
    except (ElementTree.ParseError, ValueError):
        return ""
    lines: list[str] = []
    waiting = [(node, 0) for node in reversed(root)]
    while waiting:
        node, depth = waiting.pop()
        line = _line(node)
        if line:
            lines.append(f"{'  ' * depth}{line}")
        waiting += [(child, depth + bool(line)) for child in reversed(node)]
    return "\n".join(lines)


def _line(node: ElementTree.Element) -> str:
    """The element in words; empty if it only holds others."""
    text, description = node.get("text", ""), node.get("content-desc", "")
    states = [state for state in _STATES if node.get(state) == "true"]
    if not (text or description or states):
        return ""
    words = [node.get("class", "").rpartition(".")[2] or "element"]
    words += [f'"{text}"'] if text else []
    words += [f"({description})"] if description else []
    words += [f"#{name}"] if (name := node.get("resource-id", "").rpartition("/")[2]) else []
    words += [node.get("bounds", ""), *states]
    words += ["disabled"] if node.get("enabled") == "false" else []
    return " ".join(word for word in words if word)
