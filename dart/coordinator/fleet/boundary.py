"""Checks every message of a worker (`dart.wire.rules`) before it is counted, stored or routed, and acts on violations.

- An answer that breaks a rule ends the call that waits for it with `RuleBroken`, which names the worker, the field, the
  value and the rule; the attempt is scheduled again. A trainer is asked again instead, because losing it would end the
  run: it answers from memory, without doing the work again.
- What belongs to no call (bytes that are not a message, answers to no command) only counts as a strike. A worker that
  keeps sending such things is lost, and refused while its quarantine lasts.

No message of a worker raises here. Every violation is reported to `on_violation`, with the quarantine that it led to.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from dart.agent.parsing import MAX_ASPECT_RATIO
from dart.core.fleet.conduct import Conduct, Quarantine
from dart.core.status import Quarantined
from dart.core.types import Image
from dart.screenshots import header
from dart.v1 import session_pb2 as pb
from dart.wire import rules
from dart.wire.convert import generation_from_proto
from dart.wire.rules import Limits, Malformed, Violation
from dart.wire.session import Owed

if TYPE_CHECKING:
    from dart.coordinator.fleet.sessions import Worker

log = logging.getLogger(__name__)

ASK_AGAIN = 8
"""How often a trainer is asked for another answer to one command."""
REMINDERS = 8
"""Times that a trainer is sent a command again because its answer may be among what could not be used."""
MOST_TURNED_AWAY = 64
LATE_ANSWERS = 64
"""Answers that a worker may send beyond one for each command: for example, to commands of the previous stream."""

Listener = Callable[[str, Violation, Quarantine | None], None]


MEDIA_TYPES = frozenset({"image/png", "image/jpeg", "image/webp"})


def broken_screenshot(image: Image, *, shared: bool) -> Violation | None:
    """What is wrong with a screenshot that an environment sent, as far as its first bytes show; decoding is not safe.

    `shared`: its worker may leave the bytes out, because it writes them to the run's directory. Whether the bytes have
    the digest is seen where they are stored and where they are used: looking here would cost as much as all the rest.
    """
    if not image.sha256:
        return None  # the episode is over, and needs none
    if image.media_type not in MEDIA_TYPES:
        return _image("media_type", rules.shortened(image.media_type), f"one of {sorted(MEDIA_TYPES)}")
    width, height, data = image.width, image.height, image.data
    wrong = ""
    if not 0 < width * height <= header.MAX_PIXELS:
        wrong = f"1 to {header.MAX_PIXELS:,} pixels in all"
    elif width > MAX_ASPECT_RATIO * height or height > MAX_ASPECT_RATIO * width:
        wrong = f"sides of a ratio up to {MAX_ASPECT_RATIO}"
    elif data:
        try:
            if header.size_of(data) not in (None, (width, height)):
                wrong = "those of the screenshot itself"
        except header.BadHeader as error:
            return _image("data", f"{len(data):,} bytes", f"a whole screenshot: it {error}")
    elif not shared:
        return _image("data", "empty", "sent, because this worker shares no directory")
    return _image("width_pixels, height_pixels", f"{width}×{height}", wrong) if wrong else None


def _image(field: str, value: str, rule: str) -> Violation:
    return Violation(f"Observed.image: Image.{field}", value, rule)


class Boundary:
    """`limits`: what this run knows and its workers must agree with; set by whichever part learns it."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.conduct = Conduct()
        self.on_violation: list[Listener] = []
        self._turned_away: OrderedDict[tuple[int, str], str] = OrderedDict()
        """Why workers that have not come back since were not taken into service."""

    def answered(self, worker: Worker, message: pb.SessionRequest, kind: str) -> Quarantine | None:
        """Take an answer, or what came instead of one. Returns a quarantine if the worker is to be lost."""
        if kind not in rules.ANSWERED_WITH:
            wanted = "an answer, ready, heartbeat or bye" if kind else "a message with a body"
            return self.broke(worker, Violation("SessionRequest.body", kind or "empty", wanted))
        answer = getattr(message, kind)
        assignment = answer.assignment
        owed = worker.end.owed(assignment)
        if owed is None:
            worker.end.unexpected()
            return self._late(worker)
        broken = rules.violation_of(kind, answer, owed.kind, owed.messages[-1], self.limits)
        if broken is None and kind == "generated":
            answer = generation_from_proto(answer)
            broken = rules.generation_violation(answer, self.limits)
        if broken is None:
            if not self.conduct.spotless and worker.role != pb.ROLE_ENV:  # environments are probed by `EnvPool`
                self.conduct.answered_well(worker.role_and_id, time.monotonic())
            worker.answered(owed, answer)
            return None
        if broken.mended:
            worker.answered(owed, answer)
        else:
            self._refuse(worker, owed, broken)
        self.broke(worker, broken, assignment)
        return None

    def ready(self, ready: pb.Ready, role: pb.Role) -> Violation | None:
        """What is wrong with a worker's Ready."""
        return rules.ready(ready, role, self.limits)

    def broke(self, worker: Worker, broken: Violation, assignment: pb.Assignment | None = None) -> Quarantine | None:
        """The worker broke a rule, in an answer to the command of `assignment` if there is one.

        A repaired violation is reported but is no strike; a trainer gets no quarantine. While a worker is in quarantine
        its violations are not reported, not even to the worker: they could fill the disk.
        """
        now = time.monotonic()
        told = not self.conduct.seconds_left(worker.role_and_id, now)
        quarantine = None if broken.mended else self.conduct.broke(worker.role_and_id, str(broken), now)
        if told:
            log.warning("worker %s broke a rule: %s", worker.id, broken)
            worker.notify(pb.Notice(reason=str(broken), assignment=assignment))
            for listener in self.on_violation:
                listener(worker.id, broken, quarantine)
        return None if worker.role == pb.ROLE_TRAIN else quarantine

    def turned_away(self, role_and_id: tuple[int, str], broken: Violation) -> None:
        """The worker of this role and id was not taken into service."""
        self._turned_away.pop(role_and_id, None)
        self._turned_away[role_and_id] = str(broken)
        if len(self._turned_away) > MOST_TURNED_AWAY:
            self._turned_away.popitem(last=False)

    def taken(self, role_and_id: tuple[int, str]) -> None:
        """A worker of this role and id has been taken into service."""
        self._turned_away.pop(role_and_id, None)

    def without_work(self, now: float) -> list[Quarantined]:
        """The workers that get no work because of what they sent. `now`: monotonic seconds."""
        resting = self.conduct.quarantined(now)
        return [
            *(Quarantined("refused", name, 0.0, why) for (_, name), why in self._turned_away.items()),
            *(Quarantined("worker", name, seconds, why) for (_, name), seconds, why in resting),
        ]

    def told(self, role_and_id: tuple[int, str]) -> str:
        """What the worker of this role and id has done wrong, for people; empty for one that has done nothing."""
        return self.conduct.told(role_and_id, time.monotonic())

    def refused(self, role_and_id: tuple[int, str]) -> float:
        """Seconds for which a worker of this role and id is still refused."""
        return self.conduct.seconds_left(role_and_id, time.monotonic())

    def malformed(self, worker: Worker, message: Malformed) -> Quarantine | None:
        """Note bytes that could not be read as a message. Returns a quarantine if the worker is to be lost."""
        assignment = message.assignment
        owed = worker.end.owed(assignment) if assignment is not None else None
        if owed is not None:
            self._refuse(worker, owed, message.violation)
            self.broke(worker, message.violation, assignment)
            return None
        if worker.role == pb.ROLE_TRAIN:
            worker.end.remind(REMINDERS)
        return self.broke(worker, message.violation)

    def _refuse(self, worker: Worker, owed: Owed, broken: Violation) -> None:
        """Reject the answer; ask a trainer for another one."""
        if worker.role != pb.ROLE_TRAIN or not worker.end.ask_again(owed.messages[-1], ASK_AGAIN):
            worker.refuse(owed, broken)

    def _late(self, worker: Worker) -> Quarantine | None:
        """No call waits for the answer: for example, the call was cancelled, or its answer has come before."""
        if worker.role == pb.ROLE_TRAIN:
            worker.end.remind(REMINDERS)
        if worker.end.surplus <= LATE_ANSWERS:
            return None
        return self.broke(
            worker, Violation("Assignment", "that of no open command", "that of a command without an answer")
        )
