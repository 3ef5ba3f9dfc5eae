"""YAML as configs are written in it: no name twice in one mapping, few repeats, and one kind of error for whatever is
wrong.

YAML itself forbids a name twice, but PyYAML keeps the last and says nothing: of two sections `rollout`, the first would
have no effect. It shares what an alias (`*name`) repeats, so that ten lines may mean more values than anybody who goes
through all of them ever comes to the end of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"
SHOWN = 60
MOST_REPEATED = 100_000
"""The most values, names and those within others among them, that the aliases of one text may repeat."""


class NotYaml(ValueError):
    """Why a text is not YAML."""


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._checked: set[int] = set()
        self._values = self._repeated = 0
        self._within: dict[str, int] = {}
        """How many values each anchor names: its own, and all within it."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """PyYAML calls this for each value, and for each alias, which has the node that it repeats."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        before, alias = self._values, self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if not alias:
            self._values += 1
            if event.anchor is not None:
                self._within[event.anchor] = self._values - before
            return node
        repeats, said = self._within.get(event.anchor), ""
        if repeats is None:
            said = f"*{event.anchor[:SHOWN]} is a part of what it repeats: write out what you mean"
        else:
            self._values += repeats
            self._repeated += repeats
            if self._repeated > MOST_REPEATED:
                said = f"aliases (*{event.anchor[:SHOWN]}) repeat more than {MOST_REPEATED:,} values: use fewer"
        if said:
            raise yaml.composer.ComposerError(None, None, said, event.start_mark)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """PyYAML calls this for each mapping, for some more than once, and adds what `<<` names to it."""
        if id(node) not in self._checked:
            self._checked.add(id(node))
            _once(node)
        super().flatten_mapping(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a date such as 2024-13-01, a number of thousands of digits
            said = f"{str(node.value)[:SHOWN]} is no value ({error}): put it in quotes if it is a text"
            raise yaml.constructor.ConstructorError(None, None, said, node.start_mark) from None


def _once(node: yaml.MappingNode) -> None:
    names = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
            continue
        if (key.tag, key.value) in names:
            said = f"{key.value[:SHOWN]} is given twice: keep one of them"
            raise yaml.constructor.ConstructorError(None, None, said, key.start_mark)
        names.add((key.tag, key.value))


def read_yaml(text: str) -> object:
    """What the text says. Raises NotYaml."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise NotYaml("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise NotYaml(f"{where}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise NotYaml(str(error)) from None


def read_yaml_file(path: Path) -> object:
    """What the file says. Raises NotYaml, and OSError when it cannot be read."""
    try:
        return read_yaml(path.read_text(encoding="utf-8"))
    except NotYaml:
        raise
    except ValueError as error:  # not UTF-8, or no name that a file may have
        raise NotYaml(str(error)) from None
