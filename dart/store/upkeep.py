"""Keeps a run's database and screenshots within their bounds over weeks, in small transactions.

Screenshots are kept by reference: a row of `screenshots` for each trajectory that refers to one. Bytes that no row
names come from failed attempts, and can be removed. If there is a disk bound, the screenshot rows of trajectories that
nothing needs any more are deleted, oldest first; the trajectories stay, marked as having lost their screenshots. Rows
are deleted before bytes, so a process killed in between leaves only bytes that no row names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Executable, and_, delete, exists, func, or_, select, update

from dart.store import records as r
from dart.store import tables as t
from dart.store.database import Database

_EVENTS_AT_ONCE = 5_000


@dataclass(frozen=True, slots=True)
class Unneeded:
    """Trajectories finished before `before` (Unix seconds) whose screenshots can be removed.

    These are collected successes, and training trajectories that were dropped, or that were consumed by an update
    contained in each of the newest `checkpoints`: a resumed run may go back to one of these, and trains again on what
    came after it. With `evaluations`, also those of finished evaluations. Never those of the trajectories in `needed`,
    nor of unfinished groups.
    """

    before: float
    checkpoints: int
    needed: frozenset[str] = frozenset()
    evaluations: bool = False


@dataclass(frozen=True, slots=True)
class Forgotten:
    """`digests`: screenshots that no trajectory refers to any more."""

    trajectories: int
    digests: tuple[bytes, ...]


class Upkeep:
    """Upkeep of the run that `database` writes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._trimmed = 0
        """Events up to this sequence number have been examined."""

    async def unreferenced(self, digests: Sequence[bytes]) -> list[bytes]:
        """The digests that no trajectory refers to; give those of one folder, because all between them are read.

        A list of hundreds of digests in the query would leave thousands of objects of SQLAlchemy behind in cycles,
        which the coordinator seldom collects: 15 MB with 120,000 screenshots.
        """
        if not digests:
            return []
        c = t.screenshots.c.sha256
        wanted = select(c).where(c.between(min(digests), max(digests))).distinct()
        referenced = await self._database.read(lambda connection: set(connection.execute(wanted).scalars()))
        return [digest for digest in digests if digest not in referenced]

    async def forget_oldest(self, which: Unneeded, limit: int) -> Forgotten:
        """Release the screenshots of at most `limit` of these trajectories, oldest first."""
        run_id = self._database.run_id

        def write(connection: Connection) -> Forgotten:
            floor = connection.execute(_update_in_all(run_id, which.checkpoints)).scalar_one()
            rows = connection.execute(_candidates(run_id, which, floor, limit + len(which.needed))).scalars()
            ids = [name for name in rows if name not in which.needed][:limit]
            if not ids:
                return Forgotten(0, ())
            c, s = t.trajectories.c, t.screenshots.c
            digests = connection.execute(_only_in(ids)).scalars().all()
            connection.execute(update(t.trajectories).where(c.id.in_(ids)).values(screenshots_kept=False))
            connection.execute(delete(t.screenshots).where(s.trajectory_id.in_(ids)))
            return Forgotten(len(ids), tuple(digests))

        return await self._database.write(write)

    async def trim_events(self, keep: int) -> bool:
        """Delete some events older than the newest `keep`, except the kinds that are always kept.

        Returns True if there are more to examine.
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


def _only_in(trajectory_ids: Sequence[str]) -> Executable:
    """Selects the digests of these trajectories' screenshots to which no other trajectory refers."""
    of, other = t.screenshots.alias("of"), t.screenshots.alias("other")
    elsewhere = exists().where(other.c.sha256 == of.c.sha256, other.c.trajectory_id.not_in(trajectory_ids))
    of_these = of.c.trajectory_id.in_(trajectory_ids)
    return select(of.c.sha256).where(of_these, ~elsewhere).distinct().order_by(of.c.sha256)


def _update_in_all(run_id: str, newest: int) -> Executable:
    """The last update that each of the newest kept checkpoints contains; one update makes one version.

    Older ones may be kept as well: a resumed run keeps the one that it started from to its end. Should it be all that
    is intact one day, the groups after it that have lost screenshots are dropped (`Database.release_again`).
    """
    c = t.checkpoints.c
    kept = select(c.version).where(c.run_id == run_id, c.kept).order_by(c.version.desc()).limit(newest).subquery()
    return select(func.coalesce(func.min(kept.c.version), 0))


def _candidates(run_id: str, which: Unneeded, floor: int, limit: int) -> Executable:
    """Selects the ids of these trajectories, oldest first."""
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
