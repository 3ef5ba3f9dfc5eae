"""Who is in the fleet, for the journal and for whoever waits for it to change."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sized

from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.coordinator.service.journal import Journal
from dart.core.fleet.conduct import Quarantine
from dart.v1 import session_pb2 as pb
from dart.wire.role import ROLE_NAMES
from dart.wire.rules import Violation

BETWEEN_REASONS = 60.0
"""Seconds."""


class Roster:
    """Records an event for each worker that becomes ready or is lost, when environments are missing, and for each rule
    that a worker breaks."""

    def __init__(self, fleet: Fleet, journal: Journal) -> None:
        self._journal = journal
        self.versions: dict[str, str] = {}
        """Names and versions of the software that workers run on, as they reported them in Ready."""
        self._next: dict[str, float] = {}
        """Worker → when another reason of it may be recorded."""
        self._missing: dict[str, str] = {}
        """Worker → why it has fewer environments than it wants, as last recorded."""
        self._changed = asyncio.Event()
        fleet.on_ready.append(self._worker)
        fleet.on_lost.append(self._worker)
        fleet.on_slots.append(self._slots)
        fleet.boundary.on_violation.append(self._violation)

    async def change(self) -> None:
        """Wait until a worker comes, goes, or has another number of environments."""
        await self._changed.wait()

    async def gather(
        self, environments: Callable[[], bool], replicas: Sized, wanted: int, patience_seconds: float
    ) -> None:
        """Wait until there are environments, and the wanted number of replicas; once one is there, no longer than
        `patience_seconds` for the others, which join when they come."""
        until: float | None = None
        while not environments() or len(replicas) < wanted:
            if not len(replicas):
                until = None
            elif until is None:
                until = time.monotonic() + patience_seconds
            left = None if until is None else until - time.monotonic()
            if environments() and left is not None and left <= 0:
                self._journal.event("replicas_missing", ready=len(replicas), wanted=wanted,
                                    reason=f"after {patience_seconds:g} s (rollout.wait_for_all_seconds) the run "
                                           "begins without them; they join when they come")  # fmt: skip
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left if left is not None and left > 0 else None):
                    await self.change()

    def _worker(self, worker: Worker) -> None:
        self._journal.event("worker", worker=worker.id, role=ROLE_NAMES[worker.role], state=worker.state,
                            slots=worker.slots, shares_screenshots=worker.shares_blobs)  # fmt: skip
        self.versions |= dict(worker.ready.versions)
        if worker.state == "lost":
            self._next.pop(worker.id, None)
            self._missing.pop(worker.id, None)
        self._notify()

    def _slots(self, worker: Worker, slots: pb.Slots) -> None:
        """Environments come and go with every episode; only a new reason why some are missing is recorded, and not more
        than one a minute: a worker could fill the disk with reasons. A replica's room for requests is no event."""
        if worker.role != pb.ROLE_ENV:
            return
        now = time.monotonic()
        if slots.reason and slots.reason != self._missing.get(worker.id) and now >= self._next.get(worker.id, 0.0):
            self._next[worker.id] = now + BETWEEN_REASONS
            self._journal.event("environments", worker=worker.id, environments=slots.count, wanted=worker.ready.slots,
                                reason=slots.reason)  # fmt: skip
        self._missing[worker.id] = slots.reason
        self._notify()

    def _violation(self, worker: str, broken: Violation, quarantine: Quarantine | None) -> None:
        seconds = quarantine.seconds if quarantine else 0.0
        self._journal.event("violation", worker=worker, field=broken.field, value=broken.value, rule=broken.rule,
                            mended=broken.mended, quarantine_seconds=seconds)  # fmt: skip

    def _notify(self) -> None:
        """Wake everybody who waits; each looks again whether its condition holds."""
        self._changed.set()
        self._changed = asyncio.Event()
