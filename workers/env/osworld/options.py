"""`environment.options` of the world osworld."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dart.worlds import WorldOptions
from dart.worlds.programs import checked

Port = Annotated[int, Field(ge=1, le=65535)]
Need = Literal["downloads", "websites"]
STATE_FOLDER = Path("~/.cache/dart/osworld")
EVALUATORS = Path("~/.cache/dart/osworld-evaluators")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Host(Section):
    """A machine that runs OSWorld's server: its name or address, and the ports that lead to the services inside it."""

    host: str = Field(min_length=1)
    server: Port = 5000
    chromium: Port = 9222
    vnc: Port = 8006
    vlc: Port = 8080

    @model_validator(mode="before")
    @classmethod
    def _written_short(cls, raw: object) -> object:
        """`host`, or `host:server:chromium:vnc:vlc` with the last ones left out, as OSWorld's providers write it."""
        if not isinstance(raw, str):
            return raw
        host, *ports = raw.split(":")
        if len(ports) > 4:
            raise ValueError(f"{raw!r} has {len(ports)} ports: write host:server:chromium:vnc:vlc")
        return {"host": host, **dict(zip(("server", "chromium", "vnc", "vlc"), ports, strict=False))}


class StaticPool(Section):
    """`pool: static`: machines that are already running, one environment on each.

    The env workers of one machine lock the hosts that they use, so all of them can have the same list."""

    hosts: tuple[Host, ...] = Field(
        (),
        description="As `host:server:chromium:vnc:vlc` with the last ports left out, or as a mapping. Defaults of the "
        "ports: 5000, 9222, 8006, 8080.",
    )
    renew: str = Field(
        "none",
        description="Reverts a machine after an episode: a command, run without a shell, in which {host} and {server} "
        "stand for the machine's, or a URL that is sent them as JSON by POST. `none`: nothing is reverted, so episodes "
        "begin in whatever state the last one left.",
    )
    renew_seconds: float = Field(
        600.0,
        gt=0,
        description="How long the command, or the request, may take; `boot_seconds` bounds the wait for the server "
        "after it.",
    )

    @field_validator("renew")
    @classmethod
    def _readable(cls, renew: str) -> str:
        return checked("renew", renew, "none, a URL or a command")


class EmulatorPool(Section):
    """`pool: emulator`: machines ordered from the emulator server that was released with the paper."""

    url: str = Field("", description="The emulator server, as in http://10.0.0.5:50003.")
    tokens: tuple[str, ...] = Field(
        (),
        description="One token per env worker, each as env:NAME or file:PATH. A worker takes the first that no other "
        "worker on its machine holds. It deletes every machine of its token that it does not know: give a token to "
        "nothing else.",
    )
    boot_seconds: float = Field(
        330.0, gt=0, description="How long an order is kept open. The server itself waits up to 300 s for a boot."
    )
    reconcile_seconds: float = Field(
        60.0, gt=0, description="How often the server's list is compared with the journal of what was ordered."
    )

    @field_validator("tokens")
    @classmethod
    def _no_secrets(cls, tokens: tuple[str, ...]) -> tuple[str, ...]:
        for token in tokens:
            if not token.startswith(("env:", "file:")):
                raise ValueError("each token must be env:NAME or file:PATH, so that no secret is in a config")
        return tokens


class OSWorldOptions(WorldOptions):
    """`environment.options` where `environment.kind` is osworld (docs/osworld.md)."""

    tasks_folder: Path = Field(
        description="OSWorld's task files, a folder for each domain: `evaluation_examples/examples` in OSWorld."
    )
    pool: Literal["static", "emulator"] = Field("static", description="Where machines come from.")
    static: StaticPool = StaticPool()
    emulator: EmulatorPool = EmulatorPool()
    leave_out: tuple[Need, ...] = Field(
        (),
        description="Refuse tasks that need `downloads` (files that the env worker fetches) or `websites` (pages that "
        "the machine or the evaluator opens). Tasks that need accounts are always refused.",
    )
    evaluators: Path = Field(
        EVALUATORS,
        description="The virtual environment with OSWorld's evaluators (docs/osworld.md says how to make it).",
    )
    evaluator_processes: int = Field(2, ge=1, description="How many evaluations run at once, a process for each.")
    evaluator_seconds: float = Field(540.0, gt=0, description="How long one evaluation may take.")
    state_folder: Path = Field(
        STATE_FOLDER,
        description="Downloaded files, files of evaluations, the journal of ordered machines, and locks on hosts.",
    )
    typing: Literal["clipboard", "keyboard"] = Field(
        "clipboard",
        description="How text is entered: pasted, as OSWorld's UI-TARS agent does, or key by key, as its Qwen agent "
        "does, which leaves out what is not on a US keyboard.",
    )
    failure_is: Literal["DONE", "FAIL"] = Field(
        "DONE",
        description="What a final `fail` (Qwen's `terminate` with failure) counts as. OSWorld's own Qwen agent sends "
        "DONE. FAIL, as for `infeasible` and `call_user`, is a success on infeasible tasks alone.",
    )
    start_seconds: float = Field(
        60.0, ge=0, description="Waited between the set-up and the first screenshot, as OSWorld's runner does."
    )
    settle_seconds: float = Field(3.0, ge=0, description="Waited after each action before the screenshot.")
    max_wait_seconds: float = Field(5.0, ge=0, description="The longest `wait` action that is carried out.")
    setup_seconds: float = Field(300.0, gt=0, description="How long one set-up step may take.")
    boot_seconds: float = Field(120.0, gt=0, description="How long a machine may take to answer once it is there.")
    password: str = Field(
        "password", description="The password of the machine's user, for set-up steps that call sudo. Not a secret."
    )

    @model_validator(mode="after")
    def _pool_is_there(self) -> Self:
        if self.pool == "static" and not self.static.hosts:
            raise ValueError("static.hosts is empty: name the machines, as in static: {hosts: [10.0.0.5]}")
        if self.pool == "emulator" and not (self.emulator.url.startswith("http") and self.emulator.tokens):
            raise ValueError(
                "emulator.url or emulator.tokens is missing: name the server and a token for each env worker, as in "
                "emulator: {url: http://10.0.0.5:50003, tokens: [env:OSWORLD_TOKEN]}"
            )
        return self
