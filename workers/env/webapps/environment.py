"""One environment of the world webapps: a page of the browser, with a session of an application for each episode."""

from __future__ import annotations

import asyncio

from dart.core.action import Action
from dart.core.types import Observation, Task
from dart.errors import UserError
from dart.workers.env.browser import Page, ProtocolError
from dart.workers.env.oracle import Plan
from dart.workers.env.web import WebEnv
from dart.workers.env.webapps.episodes import Session, Shared
from dart.workers.env.webapps.options import WebAppsOptions
from dart.workers.env.webapps.servers import ASKING
from dart.worlds import EnvironmentFailure, Verdict

SUITE = "webapps"
LOOK_SECONDS = 0.1
# Timers of the page's own that were to run before have run then, however busy the machine is, and what the page has
# asked its server before has been answered. A server that does not answer is found by asking it directly, not here.
_SETTLED = f"""new Promise(done => setTimeout(() =>
  fetch('/state?sid={ASKING}', {{signal: AbortSignal.timeout(2000)}}).catch(() => 0).then(() => done()), %d))"""


class WebAppEnv(WebEnv):
    """Every episode has a session of its own, in a page and browser context of its own, which reach nothing but the
    application. The application never ends an episode; its state is judged when the policy, or the step limit, does."""

    _shared: Shared
    _session: Session | None = None

    @classmethod
    async def lease(cls, shared: Shared, screen: tuple[int, int]) -> WebAppEnv:
        page = await shared.browser.new_page(screen, shared.options.step_timeout_seconds, "")
        env = cls(shared.browser, shared.options, screen, page)
        env._shared = shared
        return env

    @property
    def session(self) -> Session | None:
        """The session of the episode that is running, or was the last to run."""
        return self._session

    async def reset(self, task: Task) -> Observation:
        await self._leave()
        return await super().reset(task)

    async def _start_twice(self, task: Task) -> Observation:
        """`begin` makes a new page in any case; if that breaks, all of it is tried once more."""
        try:
            return await self._start(task)
        except EnvironmentFailure:
            if self._session is None or not self.page.broken:  # it was the application's failure, not the page's
                raise
        await self._leave()
        return await self._start(task)

    async def begin(self, task: Task) -> str:
        found = await asyncio.to_thread(self._shared.tasks.load, task.name)
        self._session = await Session.begin(self._shared, found)
        await self._replace_page()
        await self.page.navigate(self._session.page)
        await self._come_to_rest()
        return found.instruction

    async def grade(self) -> tuple[bool, Verdict]:
        """Never over. Asked after every action, it makes sure that the application still runs."""
        if not self._of_episode.server.alive():
            raise EnvironmentFailure(f"the application {self._of_episode.server.name} died during the episode")
        return False, Verdict(0.0)

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        """The task's own reward for the session's state, however the episode ended."""
        await self._settle(self._shared.options.save_seconds)
        return await self._of_episode.judge(last)

    @classmethod
    def plan(cls, name: str) -> Plan:
        raise UserError(f"webapps has no oracle for {name}: collect from a policy or an endpoint")

    async def probe(self) -> bool:
        return not self.page.broken and (self._session is None or await self._session.server.answers())

    async def renew(self) -> bool:
        await self._leave()
        return await super().renew()

    async def close(self) -> None:
        await super().close()
        await self._leave()

    @property
    def _of_episode(self) -> Session:
        assert self._session is not None, "the env worker asks after a reset"
        return self._session

    async def _leave(self) -> None:
        """End the session, after its page, which might otherwise write to it again."""
        if self._session is not None:
            session, self._session = self._session, None
            await self.page.close()
            await session.end()

    async def _new_page(self) -> Page:
        """A page that reaches the session's application alone, or nothing if there is no session."""
        reached = self._session.server.host if self._session else ""
        return await self._browser.new_page(self.screen, self._settings.step_timeout_seconds, reached)

    async def _settle(self, seconds: float) -> None:
        """Let the page run for so long by its own clock, and until its server has dealt with what it sent."""
        waiting = _SETTLED % round(1000 * seconds)
        try:
            await self.page.evaluate(waiting, wait=True, own_world=True)
        except ProtocolError:  # the page has gone to another address meanwhile
            await self.page.evaluate(waiting, wait=True, own_world=True)

    async def _come_to_rest(self) -> None:
        """Wait until the page has fetched and drawn its state: until it looks the same for `rest_seconds`."""
        options: WebAppsOptions = self._shared.options
        loop = asyncio.get_running_loop()
        began = since = loop.time()
        last = b""
        while since + options.rest_seconds > (now := loop.time()) and now < began + options.max_rest_seconds:
            await self._settle(LOOK_SECONDS)
            seen = (await self._look()).sha256
            if seen != last:
                last, since = seen, loop.time()
