"""`environment.options` of the world webapps."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field, field_validator

from dart.workers.env.web import WebOptions

PREVIEW = (
    "node", "{folder}/node_modules/vite/bin/vite.js", "preview", "{folder}", "--host", "127.0.0.1",
    "--port", "{port}", "--strictPort",
)  # fmt: skip
"""What `npm run preview` runs in every published application, without npm's two processes around it."""


class WebAppsOptions(WebOptions):
    """`environment.options` where `environment.kind` is webapps."""

    applications: Path = Field(
        description="The applications, a folder for each: `websites` in a clone of CUA-Gym-Hub. Those that tasks need "
        "must be built, by `npm install && npm run build` in their folders."
    )
    tasks_folder: Path = Field(
        description="CUA-Gym's task bundles, a folder for each: `task.json` (or `config.json`), `initial_setup.py` and "
        "`reward.py`. The programs are run with the worker's rights."
    )
    command: tuple[str, ...] = Field(
        PREVIEW,
        min_length=1,
        description="Starts an application, without a shell. {folder} stands for its folder and {port} for the port on "
        "127.0.0.1 that it must listen on. It is started in an empty folder, where published applications then keep "
        "their sessions.",
    )
    most_applications: int = Field(
        8, ge=1, description="One that no episode uses is ended when another is to start and so many are running."
    )
    start_seconds: float = Field(60.0, gt=0.0, description="How long an application may take to start.")
    answer_seconds: float = Field(15.0, gt=0.0, description="How long it may take to answer; later it counts as dead.")
    python: str | None = Field(
        None,
        description="The interpreter of tasks' programs; none: the env worker's own. The published ones need "
        "`requests`.",
    )
    program_seconds: float = Field(120.0, gt=0.0, description="How long one of these programs may take.")
    program_megabytes: int = Field(2048, ge=64, description="How much address space it may have.")
    settle_seconds: float = Field(0.3, ge=0.0, description="Waited after each action before the screenshot.")
    rest_seconds: float = Field(
        0.5, gt=0.0, description="How long a new page must look the same before its first screenshot is taken…"
    )
    max_rest_seconds: float = Field(5.0, gt=0.0, description="…or after this long, if it does not come to rest.")
    save_seconds: float = Field(
        1.0,
        ge=0.0,
        le=5.0,
        description="Waited before the verdict: published pages send changes to their servers up to 0.5 s later.",
    )

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable

    @field_validator("command")
    @classmethod
    def _has_a_port(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if not any("{port}" in word for word in command):
            raise ValueError(
                "no word of command has {port}: add it, because the application must be told where to listen"
            )
        return command
