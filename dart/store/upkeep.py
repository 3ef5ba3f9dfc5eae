"""What keeps a run's database and screenshots within their bounds over weeks, a small transaction at a time.

Screenshots are kept by reference: a row of `screenshots` for each trajectory that refers to one. Bytes that no row
names were written by attempts that failed, and may go. Where there is a bound on the disk, the rows of trajectories
that nothing needs any more are deleted, oldest first; the trajectories stay, and say that their screenshots are no
longer kept. Rows go before bytes, so that a process that is killed in between leaves bytes that nobody names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Executable, and_, delete, func, or_, select, update

from dart.store import records as r
from dart.store import tables as t
from dart.store.database import Database
from dart.store.reader import chunks

_EVENTS_AT_ONCE = 5_000


@dataclass(frozen=True, slots=True)
class Unneeded:
    """Which trajectories' screenshots may go, of those that had finished before `before` (Unix seconds).

    Those of training that were dropped, or that an update consumed which every kept checkpoint has: a resumed run may
    go back to the oldest of these, and trains again on what came after it. With `evaluations`, those of evaluations
    that have ended. Never those of the newest `pooled` successes of each task, nor of groups that go on.
    """

    before: float
    pooled: int = 0
    evaluations: bool = False


@dataclass(frozen=True, slots=True)
class Forgotten:
    """`digests`: screenshots that no trajectory refers to any more."""

    trajectories: int
    digests: tuple[bytes, ...]


class Upkeep:
    """On the run that `database` writes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._trimmed = 0
        """Events up to this sequence number have been looked at."""

    async def unreferenced(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those of the digests that no trajectory refers to."""

        def read(connection: Connection) -> set[bytes]:
            found: set[bytes] = set()
            for some in chunks(digests):
                found.update(connection.execute(_referenced(some)).scalars())
            return found

        referenced = await self._database.read(read)
        return [digest for digest in digests if digest not in referenced]

    async def forget_oldest(self, which: Unneeded, limit: int) -> Forgotten:
        """Let the screenshots go of at most `limit` of the oldest trajectories of these."""
        pooled = await self._database.newest_successes(which.pooled) if which.pooled else []
        needed = {success.trajectory_id for success in pooled}
        run_id = self._database.run_id

        def write(connection: Connection) -> Forgotten:
            floor = connection.execute(_oldest_kept_update(run_id)).scalar_one()
            rows = connection.execute(_candidates(run_id, which, floor, limit + len(needed))).scalars()
            ids = [name for name in rows if name not in needed][:limit]
            if not ids:
                return Forgotten(0, ())
            c, s = t.trajectories.c, t.screenshots.c
            digests = set(connection.execute(select(s.sha256).where(s.trajectory_id.in_(ids))).scalars())
            connection.execute(update(t.trajectories).where(c.id.in_(ids)).values(screenshots_kept=False))
            connection.execute(delete(t.screenshots).where(s.trajectory_id.in_(ids)))
            for some in chunks(sorted(digests)):
                digests.difference_update(connection.execute(_referenced(some)).scalars())
            return Forgotten(len(ids), tuple(sorted(digests)))

        return await self._database.write(write)

    async def trim_events(self, keep: int) -> bool:
        """Delete some events older than the newest `keep`, but for the kinds that tell a run's story.

        Whether there are more to look at.
        """
        run_id, e = self._database.run_id, t.events.c

        def write(connection: Connection) -> tuple[int, bool]:
            last = select(func.max(e.sequence)).where(e.run_id == run_id)
            until = (connection.execute(last).scalar_one() or 0) - keep
            upto = min(until, self._trimmed + _EVENTS_AT_ONCE)
            if upto <= self._trimmed:
                return self._trimmed, False
            old = (e.run_id == run_id, e.sequence > self._trimmed, e.sequence <= upto)
            connection.execute(delete(t.events).where(*old, e.kind.not_in(r.STORY)))
            return upto, upto < until

        self._trimmed, more = await self._database.write(write)
        return more


def _referenced(digests: Sequence[bytes]) -> Executable:
    return select(t.screenshots.c.sha256).where(t.screenshots.c.sha256.in_(digests)).distinct()


def _oldest_kept_update(run_id: str) -> Executable:
    """Of the checkpoints that are kept; one update makes one version."""
    c = t.checkpoints.c
    return select(func.coalesce(func.min(c.version), 0)).where(c.run_id == run_id, c.kept)


def _candidates(run_id: str, which: Unneeded, floor: int, limit: int) -> Executable:
    """Ids, oldest first."""
    c, g = t.trajectories.c, t.groups.c
    consumed = and_(g.state == r.GroupState.CONSUMED, g.consumed_by_update <= floor)
    over = g.state.in_((r.GroupState.DROPPED, r.GroupState.EVALUATED, r.GroupState.COLLECTED))
    unneeded: list[ColumnElement[bool]] = [and_(g.kind != r.GroupKind.EVALUATION, or_(over, consumed))]
    if which.evaluations:
        unneeded.append(and_(g.kind == r.GroupKind.EVALUATION, over))
    return (
        select(c.id)
        .join(t.groups, g.id == c.group_id)
        .where(c.run_id == run_id, c.screenshots_kept, c.finished < which.before, or_(*unneeded))
        .order_by(c.finished, c.id)
        .limit(limit)
    )
