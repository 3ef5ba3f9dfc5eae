"""Records without a guard against assignment are otherwise what their dataclass is."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest

from dart.core import records, types
from dart.core.action import Click, Point


def kind() -> Any:
    @dataclass(frozen=True, slots=True)
    class Kind:
        first: int
        second: tuple[int, ...] = ()
        third: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            if self.first < 0:
                raise ValueError(f"{self.first} is negative")

    return Kind


Guarded, Plain = kind(), records.unguarded(kind())

UNGUARDED = [types.Image, types.VersionSpan, types.Observation, types.Generation, types.Step, types.Tokens,
             types.Prompt, Point, Click]  # fmt: skip


@pytest.mark.parametrize("arguments", [(1,), (1, (2,)), (1, (2,), [3])])
def test_it_is_made_compared_and_shown_as_before(arguments: tuple[object, ...]) -> None:
    made, guarded = Plain(*arguments), Guarded(*arguments)
    assert [getattr(made, one.name) for one in fields(Plain)] == [getattr(guarded, one.name) for one in fields(Guarded)]
    assert made == Plain(*arguments) != Plain(2)
    assert repr(made) == repr(guarded)


def test_defaults_are_not_shared() -> None:
    Plain(1).third.append(1)
    assert Plain(1).third == []


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        Plain(-1)
    with pytest.raises(ValueError, match="-1 is negative"):
        replace(Plain(1), first=-1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'first'"):
        Plain()
    with pytest.raises(TypeError, match="unexpected keyword argument 'fourth'"):
        Plain(1, fourth=2)


def test_it_can_be_hashed_copied_and_pickled() -> None:
    click = Click(Point(0.25, 0.5), count=2)
    assert len({click, Click(Point(0.25, 0.5), count=2), Click(None)}) == 2
    assert copy.deepcopy(click) == pickle.loads(pickle.dumps(click)) == replace(click, count=2) == click


@pytest.mark.parametrize("record", UNGUARDED)
def test_the_records_of_a_step_have_no_guard_and_no_dictionary(record: type) -> None:
    assert is_dataclass(record)
    assert record.__setattr__ is object.__setattr__
    assert not any("__dict__" in vars(kind) for kind in record.__mro__)
