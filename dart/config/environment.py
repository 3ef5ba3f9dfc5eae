"""Environments and their tasks."""

from __future__ import annotations

from pydantic import Field, model_validator

from dart.config.base import Positive, Seconds, Section

BUILTIN_SUITE = "miniwob"


class TaskSet(Section):
    names: tuple[str, ...] = Field(
        min_length=1, description="For miniwob as miniwob.farama.org has them; `dart doctor CONFIG` checks them."
    )
    train_seeds: tuple[int, int] = Field((0, 1_000_000), description="[first, last) of the seeds trained on.")
    eval_seeds: tuple[int, int] = Field((1_000_000, 1_010_000), description="[first, last) of the held-out seeds.")

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
    """Waiting that makes a fast environment as slow as a desktop; for benchmarks. Uniform in [least, most] seconds."""

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
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
        description="The suite. dart's env workers run miniwob; for another, start `dart coordinator` and env workers "
        "of your own (docs/extending.md).",
    )
    tasks: TaskSet
    workers: Positive = Field(1, description="Env worker processes that `dart train` starts.")
    slots: Positive = Field(16, description="Environments per worker.")
    viewport: tuple[Positive, Positive] = Field((160, 210), description="Width and height in pixels.")
    step_timeout_seconds: Seconds = Field(10.0, description="A page that takes longer is replaced.")
    settle_seconds: float = Field(0.0, ge=0.0, description="Waited after each action before the screenshot.")
    max_wait_seconds: float = Field(2.0, ge=0.0, description="The longest `wait` action that is carried out.")
    delay: Delay = Field(default_factory=Delay)
    browser: str | None = Field(None, description="Chromium's executable; none: searched for on the PATH.")
