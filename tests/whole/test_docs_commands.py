"""Every `dart` and `make` command in the documentation is one that exists, with options and config files that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dart.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
         *sorted((ROOT / "examples").glob("*/README.md"))]  # fmt: skip


def commands(page: Path) -> Iterator[str]:
    """The lines of code blocks, joined where they go on, and code within a line, that begin with dart or make."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in [*lines, *inline]:
        for part in re.split(r"\s*(?:&&|\|(?!\w)|;)\s*", re.sub(r"\s+#.*", "", line).strip()):
            if re.match(r"(?:\w+=\S+ )*(?:dart|make) [a-z]", part):
                yield re.sub(r"^(?:\w+=\S+ )*", "", part).removesuffix(" &")


def wrong(command: str) -> str:
    """What is wrong with it; empty if nothing is."""
    words = shlex.split(command.replace("\\|", "|"))
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((f"no target {word}" for word in words[1:] if word not in targets and "=" not in word), "")
    known = main.get_command(click.Context(main), words[1])
    if isinstance(known, click.Group) and len(words) > 2:
        known, words = known.get_command(click.Context(known), words[2]), words[1:]
    if known is None:
        return f"no command {words[1]}"
    options = {name for parameter in known.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    for word in words[2:]:
        if word.startswith("--") and word.split("=")[0] not in options:
            return f"{words[1]} has no option {word}"
        if re.fullmatch(r"(?:\.\./)*configs/\w+\.yaml", word) and not (ROOT / "configs" / Path(word).name).exists():
            return f"{word} does not exist"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    found = {command: told for command in commands(page) if (told := wrong(command))}
    assert found == {}


def examples(command: click.Command, path: tuple[str, ...] = ("dart",)) -> Iterator[tuple[tuple[str, ...], str]]:
    """Of the command and those in it: (how it is called, the example in its help)."""
    yield path, (command.epilog or "").removeprefix("Example: ")
    for name, each in command.commands.items() if isinstance(command, click.Group) else ():
        yield from examples(each, (*path, name))


@pytest.mark.parametrize(("path", "example"), [*examples(main)])
def test_the_help_of_each_command_has_an_example_of_it(path: tuple[str, ...], example: str) -> None:
    words = tuple(shlex.split(example))
    assert words[: len(path)] == path and wrong(example) == ""
    command: click.Command = main
    while isinstance(command, click.Group):
        command, words = command.commands[words[1]], words[1:]
    command.make_context(words[0], list(words[1:]))  # raises for what it does not take


def test_they_are_found_and_what_is_wrong_is_named() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 60
    assert wrong("dart trian configs/miniwob_cpu.yaml") == "no command trian"
    assert wrong("dart train configs/miniwob_cpu.yaml --resum RUN") == "train has no option --resum"
    assert wrong("dart launch slrum CONFIG") == "no command slrum"
    assert wrong("dart launch slurm CONFIG --rum RUN") == "slurm has no option --rum"
    assert wrong("dart train configs/none.yaml") == "configs/none.yaml does not exist"
    assert wrong("make dmeo") == "no target dmeo"
