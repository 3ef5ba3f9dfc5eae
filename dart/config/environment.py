"""Environments and their tasks."""

from __future__ import annotations

from pydantic import Field, JsonValue, model_validator

from dart.config.base import Positive, Section

BUILTIN_SUITE = "miniwob"
_MINIWOB_ONCE = ("step_timeout_seconds", "settle_seconds", "max_wait_seconds", "browser")


class TaskSet(Section):
    names: tuple[str, ...] = Field(
        min_length=1, description="Task names: docs/worlds.md. `dart doctor CONFIG` checks them."
    )
    train_seeds: tuple[int, int] = Field((0, 1_000_000), description="Training seeds, [first, last).")
    eval_seeds: tuple[int, int] = Field((1_000_000, 1_010_000), description="Held-out seeds, [first, last).")

    @model_validator(mode="after")
    def _seeds(self) -> TaskSet:
        for name, (first, last) in (("train_seeds", self.train_seeds), ("eval_seeds", self.eval_seeds)):
            if not 0 <= first < last:
                raise ValueError(
                    f"{name} [{first}, {last}) is empty or negative: write [first, last) with first < last"
                )
        if self.train_seeds[0] < self.eval_seeds[1] and self.eval_seeds[0] < self.train_seeds[1]:
            raise ValueError("train_seeds and eval_seeds overlap, so nothing would be held out: make them disjoint")
        return self


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


class Environment(Section):
    kind: str = Field(
        BUILTIN_SUITE,
        pattern=r"^([a-z0-9][a-z0-9_-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="The world: `miniwob`, `ladder` or `desktop` (docs/worlds.md), or `module:Class` for one of your "
        "own (docs/extending.md). Any other name means env workers in another language, which you start yourself "
        "beside `dart coordinator`.",
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="The world's own options; those of miniwob, ladder and desktop are below."
    )
    tasks: TaskSet
    workers: Positive = Field(1, description="Env worker processes that `dart train` starts.")
    slots: Positive = Field(16, description="Environments per worker.")
    viewport: tuple[Positive, Positive] = Field((160, 210), description="Width and height in pixels.")
    delay: Delay = Field(default_factory=Delay)

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
