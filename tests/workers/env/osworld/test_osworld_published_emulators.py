"""The pool against the paper's emulator server as published: none of our machines is leaked, and none of another token
is touched.

    DART_OSWORLD_EMULATORS         a checkout of github.com/Computer-use-agents/GUI-Docker-Env
    DART_OSWORLD_EMULATORS_PYTHON  an interpreter with flask, omegaconf, psutil, requests, filelock and pytest
    DART_OSWORLD_SERVER            if set (support/osworld/desktop.py), each token's first machine is a whole desktop

support/osworld/emulator_launcher.py says what stands in for Docker, and which faults are injected. Xvfb is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from osworld.desktop import child, free_port
from osworld.operations import operate, settled
from pydantic import BaseModel

from dart.errors import UserError
from dart.workers.env.osworld import emulators
from dart.workers.env.osworld.emulators import Emulators
from dart.workers.env.osworld.options import EmulatorPool
from dart.worlds import Full

FOLDER = os.environ.get("DART_OSWORLD_EMULATORS", "")
PYTHON = os.environ.get("DART_OSWORLD_EMULATORS_PYTHON", sys.executable)
LAUNCHER = Path(__file__).parents[3] / "support/osworld/emulator_launcher.py"
pytestmark = pytest.mark.skipif(
    not FOLDER or shutil.which("Xvfb") is None, reason="DART_OSWORLD_EMULATORS is not set, or Xvfb is missing"
)
OURS, FOREIGN, QUOTA = "ours", "somebody-else", 6
CONFIG = f"""
remote_docker_server: {{port: 0, path_to_vm: /none.qcow2}}
tokens: {{{OURS}: {QUOTA}, {FOREIGN}: 40}}
auth: {{require_token: true, header_name: Authorization, bearer_prefix: "Bearer "}}
"""
HOLDING = """
import asyncio, sys, httpx, pathlib
from dart.workers.env.osworld.emulators import Emulators
from dart.workers.env.osworld.options import EmulatorPool

async def main():
    async with httpx.AsyncClient(trust_env=False) as client:
        options = EmulatorPool(url=sys.argv[1], tokens=("env:OSWORLD_TOKEN",))
        pool = Emulators(options, pathlib.Path(sys.argv[2]), client)
        await pool.start()
        for _ in range(2):
            await pool.take()
        order = asyncio.create_task(pool.take())
        await asyncio.sleep(0.3)
        print("holds", flush=True)
        await order
        await asyncio.sleep(600)

asyncio.run(main())
"""


class Alive(BaseModel):
    token: str
    id: str
    kind: str


class State(BaseModel):
    answers: dict[str, int]
    alive: list[Alive]

    def of(self, token: str) -> set[str]:
        return {one.id for one in self.alive if one.token == token}


class Published:
    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.url, self.client = url, client

    async def faults(self, **chances: float) -> None:
        (await self.client.post(f"{self.url}/test/faults", content=json.dumps(chances))).raise_for_status()

    async def state(self) -> State:
        return State.model_validate_json((await self.client.get(f"{self.url}/test/state")).content)

    async def listed(self, token: str) -> set[str]:
        answer = await self.client.get(f"{self.url}/emulators", timeout=60)
        return {one["emulator_id"] for one in answer.json() if one["token"] == token}

    async def counted(self, token: str) -> int:
        return int((await self.client.get(f"{self.url}/tokens")).json()[token]["current"])

    async def order_for_somebody_else(self) -> str:
        while True:
            headers = {"Authorization": f"Bearer {FOREIGN}"}
            try:
                answer = await self.client.post(f"{self.url}/start_emulator", headers=headers, timeout=300)
            except httpx.HTTPError:  # its answer was lost, but the machine is there
                return ""
            if answer.status_code == 200:
                return str(answer.json()["data"]["emulator_id"])

    def pool(self, folder: Path, boot_seconds: float = 60.0) -> Emulators:
        options = EmulatorPool(
            url=self.url, tokens=("env:OSWORLD_TOKEN",), boot_seconds=boot_seconds, reconcile_seconds=3600.0
        )
        return Emulators(options, folder, self.client)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSWORLD_TOKEN", OURS)
    monkeypatch.setattr(emulators, "PAUSE_SECONDS", 0.01)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    work, port = tmp_path / "server", free_port()
    (work / "configs").mkdir(parents=True)
    (work / "configs/config.yaml").write_text(CONFIG)
    with contextlib.ExitStack() as stack, (work / "log").open("wb") as log:
        environment = {**os.environ, "OSWORLD_SERVER_PORT": str(port)}
        environment.pop("PYTHONPATH", None)
        command = [PYTHON, str(LAUNCHER), FOLDER, str(port), str(work), "5"]
        process = child(stack, command, environment, work, output=log)
        for _ in range(600):
            if b"listening" in (work / "log").read_bytes():
                break
            assert process.poll() is None, (work / "log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"


async def test_a_thousand_random_operations(url: str, tmp_path: Path) -> None:
    async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        server = Published(url, client)
        for _ in range(3):
            await server.order_for_somebody_else()

        async def add() -> None:
            await server.order_for_somebody_else()

        await server.faults(lost=0.05, unauthorised=0.05, boot=1.0)
        pool, held, counts = await operate(
            1000, random.Random(7), lambda: server.pool(tmp_path / "state", boot_seconds=0.6), add, 0.4
        )
        await server.faults(lost=0.0, unauthorised=0.0, boot=0.0)
        foreign = await server.listed(FOREIGN)
        await settled(pool)
        for address in held:
            await pool.give_back(address)
        for _ in range(100):  # until orders whose answer was lost have booted, and are old enough to be strangers
            await asyncio.sleep(0.5)
            await pool.reconcile()
            if not await server.listed(OURS) and not await server.counted(OURS):
                break
        await pool.close()
        state = await server.state()
        print(json.dumps({"operations": counts, "answers": state.answers, "foreign": len(foreign)}, sort_keys=True))
        assert await server.listed(OURS) == state.of(OURS) == set(), "machines are left"
        assert await server.counted(OURS) == 0, "the quota is not given back"
        assert await server.listed(FOREIGN) == state.of(FOREIGN) == foreign, "a machine of somebody else was deleted"
        assert len(foreign) == counts["foreign"] + 3
    assert counts["Full"] > 20 and counts["MachineError"] > 20 and counts["TimeoutError"] > 20 and counts["kill"] > 5
    for answer in ("order 401", "order 403", "order 429", "order 200 lost", "delete 401", "delete 403", "delete 404"):
        assert state.answers[answer] > 0, answer


async def test_a_worker_that_is_killed(url: str, tmp_path: Path) -> None:
    """With SIGKILL, while it holds two machines and a third is booting."""
    async with httpx.AsyncClient(trust_env=False) as client:
        server = Published(url, client)
        await server.order_for_somebody_else()
        await server.faults(boot=3.0)
        command = [sys.executable, "-c", HOLDING, url, str(tmp_path / "state")]
        worker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"holds\n"
        worker.kill()
        await worker.wait()
        assert await server.counted(OURS) == 3
        pool = server.pool(tmp_path / "state", boot_seconds=5.0)
        await pool.start()
        for _ in range(100):
            await asyncio.sleep(0.2)
            await pool.reconcile()
            if not await server.listed(OURS) and not await server.counted(OURS):
                break
        assert (await server.state()).of(OURS) == set() and await server.counted(OURS) == 0
        assert len((await server.state()).of(FOREIGN)) == 1
        await pool.close()


async def test_tokens(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        server = Published(url, client)
        pool = server.pool(tmp_path / "state")
        await pool.start()
        for _ in range(QUOTA):
            await pool.take()
        with pytest.raises(Full, match=f"429: .*{QUOTA}/{QUOTA}"):
            await pool.take()
        await pool.close()
        assert await server.counted(OURS) == 0
        monkeypatch.setenv("OSWORLD_TOKEN", "unknown")
        stranger = server.pool(tmp_path / "state")
        with pytest.raises(UserError, match="does not know the token of this worker"):
            await stranger.start()
        await stranger.close()
