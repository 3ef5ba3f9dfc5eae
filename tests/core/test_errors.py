"""What leaves a group of errors."""

from __future__ import annotations

import pytest

from dart.errors import UserError, first_line, ungrouped


def test_an_error_of_these_kinds_leaves_its_group() -> None:
    with pytest.raises(UserError, match="no port") as raised, ungrouped(UserError, OSError):
        raise ExceptionGroup("tasks", [ExceptionGroup("more", [UserError("no port")]), OSError("disk")])
    assert raised.value.__suppress_context__


def test_a_group_with_other_errors_leaves_whole() -> None:
    with pytest.raises(ExceptionGroup) as raised, ungrouped(UserError):
        raise ExceptionGroup("tasks", [UserError("no port"), ZeroDivisionError()])
    assert len(raised.value.exceptions) == 2


def test_errors_without_a_group_pass() -> None:
    with pytest.raises(UserError), ungrouped(UserError):
        raise UserError("no port")
    with pytest.raises(ZeroDivisionError), ungrouped(UserError):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("said", "told"), [("\n no port \nTraceback", "no port "), ("", "ValueError"), ("x" * 1000, "x" * 300)]
)
def test_an_error_is_told_in_one_line(said: str, told: str) -> None:
    assert first_line(ValueError(said)) == told
