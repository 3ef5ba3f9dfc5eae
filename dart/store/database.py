"""What a run stores: the data manager's memory, and everything that a restart can use.

Invariants: a method that writes is one transaction, and once it returns, the data survives the end of the process, even
by kill -9 (docs/stores.md says what a power failure may take); screenshots are stored before the rows that name them.
One process writes a run (the coordinator); any number may read at the same time, and see only whole transactions.
`Database` is bound to one run: the one that `start_run` made, or the newest in the database when it was opened. Ids of
groups and trajectories are unique over all runs.

Groups go open → released → consumed; open and released ones may become dropped. A resume from an older checkpoint
releases consumed ones again, or drops those without screenshots. Those of an evaluation go open → evaluated, and back
if it goes on. Those of a collection end as collected.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, ColumnElement, Connection, Executable, Table, bindparam, delete, insert, select, update

from dart.core.fates import DROPPED, PENDING, TRAINED
from dart.core.json_text import to_json
from dart.core.types import StepEntropy, Task, Trajectory
from dart.failpoints import failpoint
from dart.store import records as r
from dart.store import tables as t
from dart.store.blobs import BlobStore
from dart.store.engine import Lane, make_lanes, parse_url, sqlite_url
from dart.store.inserts import insert_rows
from dart.store.patience import Patience
from dart.store.reader import Reader, chunks
from dart.store.schema import prepare

__all__ = ["Database", "Reader", "sqlite_url"]

T = TypeVar("T")
PATIENCE_SECONDS = 30.0
"""With a database that is locked or away, until the run says otherwise."""
CLOSING_SECONDS = 10.0
"""The same while it is closed."""

_SET_ADVANTAGES = (
    update(t.trajectories).where(t.trajectories.c.id == bindparam("of")).values(advantages_json=bindparam("value"))
)


class Database(Reader):
    """Create it with `open` and end it with `close`, or use it as an async context manager."""

    def __init__(self, url: URL, writer: Lane, reader: Lane, blobs: BlobStore, patience: Patience) -> None:
        super().__init__(url, reader, blobs)
        self._writer = writer
        self.patience = patience
        """With the database. Its screenshots' store has its own."""
        self._known_tasks: set[tuple[str, str, str]] = set()

    @classmethod
    async def open(
        cls, url: str | URL, blobs: BlobStore | str | Path, *, create: bool = True, migrate: bool = False
    ) -> Database:
        """Open a database. `create` makes missing tables; `migrate` upgrades an older schema.

        `close` closes the blob store too. Raises OlderSchema without `migrate`, and UserError for a bad URL, a newer
        schema or a missing database.
        """
        parsed, patience = parse_url(url), Patience(PATIENCE_SECONDS)
        writer, reader = make_lanes(parsed, patience)
        with ExitStack() as undo:
            undo.callback(reader.close)
            undo.callback(writer.close)
            await prepare(parsed, writer, reader, create=create, migrate=migrate)
            store = blobs if isinstance(blobs, BlobStore) else BlobStore(blobs)
            database = cls(parsed, writer, reader, store, patience)
            await database.bind_newest()
            undo.pop_all()
        return database

    def wait_at_most(self, seconds: float) -> None:
        """From now on, for a database that is locked or away, and for an object store that is away."""
        self.patience.seconds = self.blobs.patience.seconds = seconds

    async def close(self) -> None:
        """Waits for transactions under way, but not for ever for a database that is locked or away."""
        self.wait_at_most(min(self.patience.seconds, CLOSING_SECONDS))
        self._writer.close()
        await super().close()

    async def __aenter__(self) -> Database:
        return self

    async def fold_wal(self) -> bool:
        """Empty SQLite's write-ahead log. Returns False if a reader prevents it, which does no harm."""
        return await self._writer.fold_wal()

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one write transaction, which is durable when this returns."""
        return await self._writer.run(work)

    async def _execute(self, statement: Executable, rows: Any = None) -> None:
        await self.write(lambda connection: connection.execute(statement, rows))

    # ---- the run ----

    async def start_run(
        self,
        run_id: str,
        name: str,
        config: Mapping[str, object],
        *,
        started: float,
        kind: r.RunKind = r.RunKind.TRAINING,
    ) -> None:
        """Start a new run; from now on this object writes and reads that run."""
        row = {
            "id": run_id,
            "name": name,
            "kind": kind,
            "config_json": to_json(config),
            "state": r.RunState.RUNNING,
            "started": started,
        }
        await self._execute(insert(t.runs), row)
        self._run_id = run_id

    async def resume_run(self, renewed: Mapping[str, object] | None = None) -> None:
        """The run continues in this process, after an earlier one.

        `renewed`: sections of its config that are recorded instead of those that it began with.
        """
        config = {**(await self.run()).config, **(renewed or {})}
        await self._update_run(
            state=r.RunState.RUNNING,
            finished=None,
            summary_json=None,
            control_address=None,
            config_json=to_json(config),
        )

    async def set_run_state(self, state: r.RunState, finished: float | None = None) -> None:
        await self._update_run(state=state, finished=finished)

    async def set_control_address(self, control_address: str) -> None:
        await self._update_run(control_address=control_address)

    async def finish_run(self, summary: Mapping[str, object], finished: float) -> None:
        await self._update_run(state=r.RunState.FINISHED, finished=finished, summary_json=to_json(summary))

    async def _update_run(self, **values: object) -> None:
        await self._execute(update(t.runs).where(t.runs.c.id == self.run_id).values(**values))

    # ---- tasks, groups, trajectories ----

    async def open_group(
        self,
        group_id: str,
        task: Task,
        planned: int,
        opened: float,
        *,
        kind: r.GroupKind = r.GroupKind.TRAINING,
        plan: str = "",
    ) -> None:
        """Open a group of `planned` roll-outs of one task; `plan` explains their number and step limit."""
        row = self._group_row(group_id, task, planned, opened, kind=kind, plan=plan)
        key = (self.run_id, task.suite, task.name)

        def write(connection: Connection) -> None:
            self._ensure_tasks(connection, [key])
            connection.execute(insert(t.groups), row)

        await self.write(write)
        self._known_tasks.add(key)

    def _group_row(
        self, group_id: str, task: Task, planned: int, opened: float, *, kind: r.GroupKind, plan: str = ""
    ) -> dict[str, object]:
        return {
            "id": group_id,
            "run_id": self.run_id,
            "suite": task.suite,
            "task_name": task.name,
            "seed": task.seed,
            "planned": planned,
            "plan": plan,
            "kind": kind,
            "state": r.GroupState.OPEN,
            "fate": PENDING,
            "opened": opened,
        }

    def _ensure_tasks(self, connection: Connection, keys: Iterable[tuple[str, str, str]]) -> None:
        """Add rows for tasks, given as (run id, suite, name), that have none yet."""
        for run_id, suite, name in [key for key in keys if key not in self._known_tasks]:
            c = t.tasks.c
            same = (c.run_id == run_id) & (c.suite == suite) & (c.name == name)
            if connection.execute(select(c.name).where(same)).first() is None:
                connection.execute(insert(t.tasks), {"run_id": run_id, "suite": suite, "name": name})

    async def add_trajectory(self, trajectory: Trajectory, attempt: int = 1) -> None:
        """Stores a finished roll-out of an open group: its screenshots, then its rows.

        An image without bytes must be in the blob store. Raises BlobError, and OSError where a directory fails.
        """
        await self.blobs.put_many_async(trajectory.images)
        failpoint("screenshots-put")
        await self.write(lambda connection: self._insert_trajectory(connection, trajectory, attempt))

    def _insert_trajectory(self, connection: Connection, trajectory: Trajectory, attempt: int) -> None:
        connection.execute(insert(t.trajectories), r.trajectory_to_row(trajectory, self.run_id, attempt))
        insert_rows(connection, t.steps, [r.step_to_row(step, trajectory.id) for step in trajectory.steps])
        insert_rows(connection, t.screenshots, r.screenshot_rows(trajectory))

    async def add_collected(self, successes: Sequence[Trajectory], added: float) -> None:
        """Stores successes from elsewhere, each with its images' bytes, in closed groups: all of them or none."""
        await self.blobs.put_many_async(image for one in successes for image in one.images)
        groups = {one.group_id: one.task for one in successes}
        planned = Counter(one.group_id for one in successes)
        rows = [
            self._group_row(group_id, task, planned[group_id], added, kind=r.GroupKind.COLLECTED)
            | {"state": r.GroupState.COLLECTED, "fate": r.GroupState.COLLECTED, "closed": added}
            for group_id, task in groups.items()
        ]
        keys = {(self.run_id, task.suite, task.name) for task in groups.values()}
        c = t.trajectories.c

        def write(connection: Connection) -> None:
            self._ensure_tasks(connection, keys)
            connection.execute(insert(t.groups), rows)
            for success in successes:
                self._insert_trajectory(connection, success, 1)
            connection.execute(update(t.trajectories).where(c.group_id.in_(groups)).values(fate=r.GroupState.COLLECTED))

        if rows:
            await self.write(write)
            self._known_tasks |= keys

    async def close_group(
        self,
        group_id: str,
        state: r.GroupState,
        detail: str,
        fate: str,
        advantages: Mapping[str, Sequence[float]],
        closed: float,
        *,
        fates: Mapping[str, str] | None = None,
        pooled: Trajectory | None = None,
    ) -> None:
        """Store what curation decided, and why. `fate` applies to the group's trajectories, except those named in
        `fates`. `advantages`: for each trajectory, one per step.

        `pooled` is stored as one more trajectory of the group: a copy of a success; its screenshots are already stored.

        It is called again for a released group that became stale: advantages that are not given stay unchanged.
        Raises ValueError for a group that is consumed, dropped or unknown.
        """
        g, c = t.groups.c, t.trajectories.c
        unfinished = (r.GroupState.OPEN, r.GroupState.RELEASED)

        def write(connection: Connection) -> None:
            changed = connection.execute(
                update(t.groups)
                .where(g.id == group_id, g.state.in_(unfinished))
                .values(state=state, fate=detail, closed=closed)
            )
            if changed.rowcount != 1:
                raise ValueError(f"group {group_id} is neither open nor released, so it cannot become {state}")
            if pooled is not None:
                self._insert_trajectory(connection, pooled, 1)
            # A failure that a pooled success replaced keeps that fate when its group becomes stale.
            undecided = (c.group_id == group_id, c.fate.not_like(f"{DROPPED}%"))
            connection.execute(update(t.trajectories).where(*undecided).values(fate=fate))
            self._set_fates(connection, fates or {})
            if advantages:
                values = [{"of": name, "value": json.dumps(list(own))} for name, own in advantages.items()]
                connection.execute(_SET_ADVANTAGES, values)

        await self.write(write)

    async def close_evaluations(self, closed: float) -> None:
        """What an earlier process of the run left open of its evaluations is over, until `reopen_evaluation`."""
        g, c = t.groups.c, t.trajectories.c
        is_open = (g.run_id == self.run_id, g.kind == r.GroupKind.EVALUATION, g.state == r.GroupState.OPEN)

        def write(connection: Connection) -> None:
            members = c.group_id.in_(select(g.id).where(*is_open))
            connection.execute(update(t.trajectories).where(members).values(fate=r.GroupState.EVALUATED))
            over = {"state": r.GroupState.EVALUATED, "fate": r.GroupState.EVALUATED, "closed": closed}
            connection.execute(update(t.groups).where(*is_open).values(**over))

        await self.write(write)

    async def reopen_evaluation(self, group_id: str) -> None:
        """An evaluation that was cut off goes on: its group is open again, until `close_group`."""
        g = t.groups.c
        again = update(t.groups).where(g.id == group_id, g.state == r.GroupState.EVALUATED)
        await self._execute(again.values(state=r.GroupState.OPEN, fate=PENDING, closed=None))

    def _set_fates(self, connection: Connection, fates: Mapping[str, str]) -> None:
        c = t.trajectories.c
        if fates:
            statement = update(t.trajectories).where(c.id == bindparam("of")).values(fate=bindparam("value"))
            connection.execute(statement, [{"of": name, "value": fate} for name, fate in fates.items()])

    async def consume_groups(self, group_ids: Sequence[str], number: int) -> None:
        """Update `number` has trained on these groups. Their trajectories become trained, except dropped ones.

        Raises ValueError, and changes nothing, if one of them is not released: nothing is trained on twice.
        """
        g, c = t.groups.c, t.trajectories.c
        values = {"state": r.GroupState.CONSUMED, "fate": TRAINED, "consumed_by_update": number}

        def write(connection: Connection) -> None:
            changed = connection.execute(
                update(t.groups).where(g.id.in_(group_ids), g.state == r.GroupState.RELEASED).values(**values)
            )
            if changed.rowcount != len(group_ids):
                raise ValueError(f"update {number}: only {changed.rowcount} of {len(group_ids)} groups are released")
            connection.execute(
                update(t.trajectories)
                .where(c.group_id.in_(group_ids), c.fate.not_like(f"{DROPPED}%"))
                .values(fate=TRAINED)
            )

        await self.write(write)

    async def release_again(self, update_number: int) -> int:
        """Groups that later updates trained on wait for the trainer again. Returns their number.

        For a run that resumes from a checkpoint older than its last update. A group that has lost screenshots cannot be
        trained on again, so it is dropped.
        """
        g, c = t.groups.c, t.trajectories.c

        def write(connection: Connection) -> int:
            lost = select(g.id).where(g.run_id == self.run_id, g.consumed_by_update > update_number)
            ids = list(connection.execute(lost).scalars())
            unkept = select(c.group_id).where(c.group_id.in_(lost), c.screenshots_kept.is_(False))
            dropped = set(connection.execute(unkept).scalars())
            self._change_consumed(connection, sorted(dropped), r.GroupState.DROPPED, r.UNKEPT)
            again = [name for name in ids if name not in dropped]
            self._change_consumed(connection, again, r.GroupState.RELEASED, PENDING)
            return len(again)

        return await self.write(write)

    def _change_consumed(self, connection: Connection, ids: Sequence[str], state: r.GroupState, fate: str) -> None:
        g, c = t.groups.c, t.trajectories.c
        for some in chunks(ids):
            values = {"state": state, "fate": fate, "consumed_by_update": None}
            connection.execute(update(t.groups).where(g.id.in_(some)).values(**values))
            trained = (c.group_id.in_(some), c.fate == TRAINED)
            connection.execute(update(t.trajectories).where(*trained).values(fate=fate))

    # ---- versions, syncs, checkpoints, events ----

    async def add_version(self, version: int, number: int, metrics: Mapping[str, float], created: float) -> None:
        """Update `number` made weight version `version`; a run that resumed from before it makes it again."""
        row = {"version": version, "update": number, "created": created, "metrics_json": to_json(metrics)}
        await self._replace(t.versions, t.versions.c.version == version, row)

    async def add_entropies(self, update_number: int, entropies: Sequence[StepEntropy]) -> None:
        """What the update's selection of steps saw; it replaces what an earlier update saw of the same trajectories.

        Those of trajectories that are not stored are left out.
        """
        by_trajectory: dict[str, list[dict[str, object]]] = {}
        for one in entropies:
            by_trajectory.setdefault(one.trajectory_id, []).append({"update": update_number, **asdict(one)})

        def write(connection: Connection) -> None:
            for some in chunks(sorted(by_trajectory)):
                stored = connection.execute(select(t.trajectories.c.id).where(t.trajectories.c.id.in_(some))).scalars()
                ids = list(stored)
                connection.execute(delete(t.step_entropies).where(t.step_entropies.c.trajectory_id.in_(ids)))
                insert_rows(connection, t.step_entropies, [row for name in ids for row in by_trajectory[name]])

        if by_trajectory:
            await self.write(write)

    async def add_sync(self, sync: r.SyncRecord) -> None:
        await self._execute(insert(t.syncs), [{"run_id": self.run_id, **asdict(sync)}])

    async def add_checkpoint(self, checkpoint: r.CheckpointRecord) -> None:
        """Record a checkpoint once its folder is complete; one with the same path is replaced."""
        await self._replace(t.checkpoints, t.checkpoints.c.path == checkpoint.path, asdict(checkpoint))

    async def drop_checkpoint(self, path: str) -> None:
        """The folder is about to be deleted: `checkpoints` must not name it."""
        c = t.checkpoints.c
        await self._execute(update(t.checkpoints).where(c.run_id == self.run_id, c.path == path).values(kept=False))

    async def append_events(self, events: Sequence[r.Event]) -> None:
        """Events with rising sequence numbers, above those of all earlier calls or, after one that failed, the same."""
        if not events:
            return
        run_id, c = self.run_id, t.events.c
        rows = [{"run_id": run_id, **asdict(event)} for event in events]

        def write(connection: Connection) -> None:
            # The connection may have been lost after a commit, so that a call fails whose events are there.
            connection.execute(delete(t.events).where(c.run_id == run_id, c.sequence >= events[0].sequence))
            connection.execute(insert(t.events), rows)

        await self.write(write)

    async def _replace(self, table: Table, same: ColumnElement[bool], row: dict[str, object]) -> None:
        run_id = self.run_id

        def write(connection: Connection) -> None:
            connection.execute(delete(table).where(table.c.run_id == run_id, same))
            connection.execute(insert(table), {"run_id": run_id, **row})

        await self.write(write)
