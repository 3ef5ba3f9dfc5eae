"""Environments and their tasks."""

from __future__ import annotations

import re

from pydantic import Field, JsonValue, field_validator, model_validator

from dart.config.base import Positive, Seconds, Section
from dart.config.tasks import TaskSet

BUILTIN_SUITE = "miniwob"
_KIND = re.compile(r"[a-z0-9][a-z0-9_-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MINIWOB_ONCE = ("step_timeout_seconds", "settle_seconds", "max_wait_seconds", "browser")


class Delay(Section):
    """Delays that make a fast environment as slow as a desktop, for benchmarks. Uniform in [least, most] seconds."""

    reset_seconds: tuple[float, float] = Field((0.0, 0.0), description="After each reset.")
    step_seconds: tuple[float, float] = Field((0.0, 0.0), description="After each action.")

    @model_validator(mode="after")
    def _ordered(self) -> Delay:
        for name, (least, most) in (("reset_seconds", self.reset_seconds), ("step_seconds", self.step_seconds)):
            if not 0 <= least <= most < float("inf"):
                raise ValueError(f"{name} [{least:g}, {most:g}] is no span of time: write [least, most], as in [2, 10]")
        return self


class VerbTimeouts(Section):
    """Time limits of the world's verbs, in seconds; none: what the world declares."""

    start: Seconds | None = Field(None, description="The world's start; the env worker ends if it takes longer.")
    lease: Seconds | None = Field(None, description="Booting an environment.")
    reset: Seconds | None = Field(None, description="Setting up a task.")
    act: Seconds | None = Field(None, description="One action, with its screenshot.")
    judge: Seconds | None = Field(None, description="The verdict: an evaluator may need ten minutes.")
    probe: Seconds | None = Field(None, description="Asking an environment whether it is alive.")
    renew: Seconds | None = Field(None, description="Making an environment ready for its next episode.")
    close: Seconds | None = Field(None, description="Disposing of an environment, and closing the world.")

    @property
    def ending(self) -> float:
        """How long an env worker may take to end, in seconds: it may have machines to give back."""
        return self.close or 60.0

    @property
    def chosen(self) -> dict[str, float]:
        """Those that are set, by verb."""
        return {name: seconds for name in type(self).model_fields if (seconds := getattr(self, name)) is not None}


class Environment(Section):
    kind: str = Field(
        BUILTIN_SUITE,
        description="The world: one that ships with dart (docs/worlds.md), or `module:Class` for one of your own "
        "(docs/extending.md). Any other name means env workers in another language, which you start yourself beside "
        "`dart coordinator`.",
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="The world's own options; those of dart's worlds are below."
    )
    tasks: TaskSet
    workers: Positive = Field(1, description="Env worker processes that `dart train` starts.")
    slots: Positive = Field(16, description="Environments per worker.")
    viewport: tuple[Positive, Positive] = Field((160, 210), description="Width and height of screenshots in pixels.")
    timeouts: VerbTimeouts = Field(default_factory=VerbTimeouts)
    delay: Delay = Field(default_factory=Delay)

    @field_validator("kind")
    @classmethod
    def _named(cls, kind: str) -> str:
        if not _KIND.fullmatch(kind):
            raise ValueError(
                f"{kind!r} names no world: use one that ships with dart, module:Class for one of your own, or a name "
                "in lower case for env workers in another language"
            )
        return kind

    @model_validator(mode="before")
    @classmethod
    def _moved(cls, raw: object) -> object:
        """Move MiniWoB's options to `options`: configs of older runs have them directly in this section."""
        if not isinstance(raw, dict) or raw.get("kind", BUILTIN_SUITE) != BUILTIN_SUITE:
            return raw
        moved = {name: value for name, value in raw.items() if name in _MINIWOB_ONCE}
        options = raw.get("options", {})
        if not moved or not isinstance(options, dict):
            return raw
        if twice := sorted(moved.keys() & options.keys()):
            raise ValueError(f"{twice[0]} is given twice: keep only environment.options.{twice[0]}")
        return {name: value for name, value in raw.items() if name not in moved} | {"options": options | moved}
