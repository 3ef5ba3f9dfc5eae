"""What `dart doctor` says of machines that do not answer, and of tokens that the emulator server does not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from osworld import standin
from osworld.emulators import EmulatorServer
from osworld.machine import FakeMachine

from dart.workers.env.osworld.options import OSWorldOptions
from dart.workers.env.osworld.world import OSWorld

pytest.importorskip("httpx")


def test_doctor_says_which_machines_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "token")
    monkeypatch.setenv("FOREIGN", "foreign")
    with FakeMachine((160, 224)) as machine, EmulatorServer({"token": 1}) as server:
        one = f"127.0.0.1:{machine.port}"
        raw = {
            "tasks_folder": str(standin.tasks(tmp_path / "tasks")),
            "evaluators": str(standin.environment(tmp_path / "evaluators")),
            "static": {"hosts": [one]},
        }
        emulator = {"pool": "emulator", "emulator": {"url": server.url, "tokens": ["env:TOKEN"]}}
        for changes, why in (
            ({}, None),
            ({"static": {"hosts": [one, "127.0.0.1:9"]}}, "http://127.0.0.1:9/screenshot does not answer"),
            ({"static": {"hosts": [one, "127.0.0.1:9"], "renew": "revert {host}"}}, None),
            (emulator, None),
            (emulator | {"emulator": {"url": "http://127.0.0.1:9", "tokens": ["env:TOKEN"]}}, "start the server"),
            (emulator | {"emulator": {"url": server.url, "tokens": ["env:TOKEN", "env:UNSET"]}}, "UNSET"),
            (
                emulator | {"emulator": {"url": server.url, "tokens": ["env:TOKEN", "env:FOREIGN"]}},
                "env:FOREIGN: add it",
            ),
        ):
            checks = OSWorld.checks(OSWorldOptions.model_validate(raw | changes))
            said = checks["osworld machines"]()
            assert (why is None and said is None) or (why is not None and why in str(said))
            assert [name for name, check in checks.items() if name != "osworld machines" and check()] == []
