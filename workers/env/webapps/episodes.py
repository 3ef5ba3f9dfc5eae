"""One episode of a task: a session of its application, from the task's set-up to its reward."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from dart.core.action import Action, Finish
from dart.core.cutting import cut
from dart.errors import UserError
from dart.workers.env.browser import Browser
from dart.workers.env.webapps import programs
from dart.workers.env.webapps.options import WebAppsOptions
from dart.workers.env.webapps.servers import ASKING, Difference, Server, Servers
from dart.workers.env.webapps.tasks import Tasks, WebTask, fill_in
from dart.worlds import EnvironmentFailure, Verdict

SID = re.compile(r"[A-Za-z0-9_-]{1,200}")
"""Published servers drop all other characters from a session's id."""
MOST_DIFFERENCE = 24_000
MOST_SAID = 4000
_NOT_FETCHED = re.compile(r"CRITICAL: *Cannot (fetch|read)")
"""Published rewards print "CRITICAL: Cannot fetch state …" and then a reward of 0 if their request fails."""


@dataclass
class Shared:
    """What the environments of a worker share."""

    options: WebAppsOptions
    tasks: Tasks
    servers: Servers
    browser: Browser
    sids: set[str] = field(default_factory=set)
    """Every session there has been."""


async def _remove(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class Session:
    """A session of a task's application. Make one with `begin`."""

    def __init__(self, shared: Shared, task: WebTask, server: Server, folder: Path) -> None:
        self.task, self.server, self.sid = task, server, ""
        self._shared, self._folder = shared, folder
        self._page = ""

    @classmethod
    async def begin(cls, shared: Shared, task: WebTask) -> Session:
        """Start the application if it does not run, and set the task up.

        Raises EnvironmentFailure, and UserError if the task itself is wrong.
        """
        async with contextlib.AsyncExitStack() as undo:
            server = await shared.servers.take(task.application)
            undo.push_async_callback(shared.servers.give, server)
            folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="episode-", dir=server.folder))
            undo.push_async_callback(_remove, folder)
            session = cls(shared, task, server, folder)
            await session._set_up()
            undo.pop_all()
        return session

    @property
    def page(self) -> str:
        """The address that the episode begins at."""
        return self._page

    async def run(self, program: str, last: Action | None = None) -> programs.Ran:
        """Run one of the task's programs. The policy's last words are given as the publishers' own runner does."""
        finish = last if isinstance(last, Finish) else Finish("fail")
        variables = {"CUA_GYM_AGENT_ANSWER": finish.answer, "CUA_GYM_AGENT_STATUS": finish.status} if last else {}
        options = self._shared.options
        filled_in = fill_in(program, self.server.host, self._sid_file)
        return await programs.run(
            filled_in,
            self._folder,
            options.interpreter,
            options.program_seconds,
            options.program_megabytes,
            variables,
        )

    async def judge(self, last: Action) -> Verdict:
        """Run the reward. A reward of 0 is believed only if the application answered throughout."""
        await self.server.difference(self.sid)
        ran = await self.run(self.task.reward, last)
        difference = await self.server.difference(self.sid)
        reward, error = programs.reward_in(ran.said), ""
        if ran.missing_module:
            raise EnvironmentFailure(f"reward.py of task {self.task.name}: {ran.told}: install it for {self._python}")
        if ran.code or reward is None:
            # The policy has left something that the reward cannot read: it must not be able to end episodes so.
            error = ran.errors[-MOST_SAID:] or "it printed no reward"
            reward = 0.0
        if reward == 0 and _NOT_FETCHED.search(ran.said):
            raise EnvironmentFailure(f"reward.py of task {self.task.name} did not get the state: {ran.told}")
        return Verdict(min(max(reward, 0.0), 1.0), self._evidence(ran, difference, error))

    async def end(self) -> None:
        """Have the application drop the session, and remove its folder. What is left goes with the server."""
        try:
            if self.server.alive():
                with contextlib.suppress(EnvironmentFailure):
                    await self.server.forget(self.sid)
        finally:
            await self._shared.servers.give(self.server)
            await _remove(self._folder)

    @property
    def _sid_file(self) -> Path:
        return self._folder / "sid"

    @property
    def _python(self) -> str:
        return f"environment.options.python {self._shared.options.interpreter}"

    async def _set_up(self) -> None:
        opened: tuple[str, ...] = ()
        if self.task.setup is None:
            await asyncio.to_thread(self._sid_file.write_text, self._folder.name)
        else:
            opened = await self._run_setup(self.task.setup)
        self.sid = await asyncio.to_thread(self._read_sid)
        if self.sid in self._shared.sids:
            raise UserError(
                f"task {self.task.name}: its initial_setup.py gives every session the id {self.sid!r}, so that "
                "episodes would share one: have it make a new id each time, as by uuid.uuid4()"
            )
        self._shared.sids.add(self.sid)
        if (await self.server.difference(self.sid)).initial_state is None:
            raise UserError(f"task {self.task.name}: its initial_setup.py has set no state: correct it")
        begins = [one for one in opened if one.startswith(f"http://{self.server.host}/") and f"sid={self.sid}" in one]
        self._page = begins[-1] if begins else f"http://{self.server.host}/?sid={self.sid}"

    async def _run_setup(self, setup: str) -> tuple[str, ...]:
        """What it opened in a browser."""
        ran = await self.run(setup)
        if ran.code:
            await self.server.difference(ASKING)  # an application that does not answer is not the task's fault
            hint = f": install it for {self._python}" if ran.missing_module else ""
            raise UserError(f"task {self.task.name}: its initial_setup.py ended with {ran.code}: {ran.told}{hint}")
        return ran.opened

    def _read_sid(self) -> str:
        sid = self._sid_file.read_text(errors="replace").strip() if self._sid_file.is_file() else ""
        if not SID.fullmatch(sid):
            raise UserError(
                f"task {self.task.name}: its initial_setup.py has left {sid[:80]!r} in /tmp/task_web_sid: it must "
                "write the session's id there, of letters, digits, - and _"
            )
        return sid

    def _evidence(self, ran: programs.Ran, difference: Difference, error: str) -> dict[str, object]:
        text = json.dumps(difference.state_diff)
        whole = len(text) <= MOST_DIFFERENCE
        evidence: dict[str, object] = {
            "application": self.server.name,
            "session": self.sid,
            "difference": difference.state_diff if whole else cut(text, MOST_DIFFERENCE),
            "reward_said": cut(ran.said, MOST_SAID),
        }
        return {**evidence, "error": error} if error else evidence
