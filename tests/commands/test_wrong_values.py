"""Wrong configs, by kind: one sentence in one voice, with the field, the value and the remedy."""

from __future__ import annotations

import copy
import errno
import math
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from dart.cli import main
from dart.config import Config, ConfigError, load, parse
from dart.errors import UserError, unwritable
from dart.rundir import RunDirectory

CONFIG = Path(__file__).parents[2] / "configs" / "ladder_demo.yaml"
FOREIGN = ("Input should", "NoneType", "valid ", "instance of", "[type=", "literal[", "validation error", "<class")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stop.updates=0", "stop.updates (it is 0): give a number of at least 1"),
        ("stop.updates=1.5", "stop.updates (it is 1.5): give a whole number"),
        ("stop.updates=many", "stop.updates (it is 'many'): give a whole number"),
        ("stop.updates=[1]", "stop.updates (it is [1]): give a whole number"),
        ("trainer.learning_rate=fast", "trainer.learning_rate (it is 'fast'): give a number"),
        ("trainer.learning_rate=.nan", "trainer.learning_rate (it is nan): give a finite number"),
        ("trainer.learning_rate=0", "trainer.learning_rate (it is 0): give a number above 0"),
        ("trainer.learning_rate=null", "trainer.learning_rate (it is empty): give a number"),
        ("trainer.loss.clip_low=2", "trainer.loss.clip_low (it is 2): give a number of at most 1"),
        ("trainer.loss.entropy_quantile=1", "trainer.loss.entropy_quantile (it is 1): give a number below 1"),
        ("trainer.loss.dual_clip=1", "trainer.loss.dual_clip (it is 1): dual_clip must be above 1"),
        ("trainer.freeze_vision=perhaps", "trainer.freeze_vision (it is 'perhaps'): write true or false"),
        ("run.name=7", "run.name (it is 7): give a text, in quotes if it looks like something else"),
        ("run.directory=7", "run.directory (it is 7): give a path"),
        ("trainer.loss.ratio=sequenc", "trainer.loss.ratio (it is 'sequenc'): use token or sequence; did you mean seq"),
        ("trainer.loss.ratio=null", "trainer.loss.ratio (it is empty): use token or sequence"),
        ("trainer.learnin_rate=1", "trainer.learnin_rate is not a known field (it is 1): did you mean learning_rate?"),
        ("trainr.ranks=1", "trainr is not a known field: did you mean trainer?"),
        ("trainer=null", "trainer (it is empty): give its fields, as in {name: value}, or leave it out"),
        ("trainer=[1]", "trainer (it is [1]): give its fields, as in {name: value}, or leave it out"),
        ("trainer.adam_betas=0.9", "trainer.adam_betas (it is 0.9): give a list, as in [a, b]"),
        ("trainer.adam_betas=[0.9]", "trainer.adam_betas.1 is missing: add it"),
        ("trainer.adam_betas=[0.9, 0.9, 0.9]", "trainer.adam_betas (it is [0.9, 0.9, 0.9]): give at most 2 entries"),
        ("environment.options=7", "environment.options (it is 7): give its fields"),
    ],
)
def test_a_wrong_value_is_told_in_one_sentence(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(CONFIG, [override])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def fields(section: type[BaseModel], above: str = "") -> list[str]:
    found = []
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *typing.get_args(field.annotation)]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        found += [above + name, *(fields(inner, f"{above}{name}.") if inner else [])]
    return found


@pytest.mark.parametrize("value", [None, "wrong", -1, 0.5, [], [{"a": 1}], {"a": 1}, math.inf, True])
def test_no_field_answers_a_wrong_value_in_a_librarys_words(value: object) -> None:
    refused, written = 0, yaml.safe_load(CONFIG.read_text())
    for field in fields(Config):
        *above, last = field.split(".")
        raw = section = copy.deepcopy(written)
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
        try:
            parse(raw, "config", CONFIG.parent)
        except ConfigError as error:
            refused += 1
            assert not any(words in str(error) for words in FOREIGN), (field, str(error))
            assert str(error).count("\n") < 4
    assert refused > 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: write sections such as model: and stop:, as configs/ladder_demo.yaml has them"),
        ("# nothing", "is empty: write sections"),
        ("- a", "is a list: write sections"),
        ("words", "is a text: write sections"),
        ("7", "is a single value: write sections"),
        ("true", "is true or false: write sections"),
        ("a: [", "is not YAML: line 1, column 5: expected the node content, but found '<stream end>'"),
        ("a: !b c", "is not YAML: line 1, column 4: could not determine a constructor for the tag '!b'"),
    ],
)
def test_a_file_that_is_no_config_is_told_in_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert str(refused.value).startswith(f"config {path} {message}") and "\n" not in str(refused.value)


def test_an_empty_device_is_an_empty_config() -> None:
    with pytest.raises(ConfigError, match="config /dev/null is empty: write sections"):
        load(Path("/dev/null"))


@pytest.mark.parametrize("command", ["eval", "collect --from policy"])
def test_a_checkpoint_that_does_not_exist_is_named_as_it_was_given(command: str) -> None:
    name, *more = command.split()
    done = CliRunner().invoke(main, [name, *more, str(CONFIG), "--checkpoint", "nope"])
    assert done.exit_code == 2
    assert "--checkpoint nope: the folder does not exist" in done.output and "model.path" not in done.output


def test_a_full_disk_asks_for_room_and_not_for_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(UserError, match=r"\(No space left on device\): make room on its disk, or choose another"):
        RunDirectory.make(tmp_path, "run")
    assert unwritable(OSError(errno.EACCES, "denied"), "choose another") == "(denied): choose another"


@pytest.mark.parametrize("command", ["train", "coordinator", "doctor", "eval", "serve-world"])
def test_a_mistake_in_the_config_is_told_before_anything_heavy_is_imported(command: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("stop: {updates: 0}\n")
    script = (
        "import sys\nfrom dart.cli import main\n"
        f"try: main([{command!r}, {str(path)!r}])\n"
        "except SystemExit as end: print(end.code)\n"
        "heavy = ('grpc', 'sqlalchemy', 'numpy', 'rich', 'torch', 'dart.coordinator', 'dart.commands')\n"
        "print(*[name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"] and "stop.updates (it is 0)" in done.stderr
