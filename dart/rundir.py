"""A run directory: what is in it, how it is made, opened, locked and found. Every name in it is defined only here.

    config.yaml      the resolved config              blobs/        screenshots by SHA-256
    run.db           everything that a restart needs  checkpoints/  v000050, v000100, ...
    run.lock         held by the process that works   logs/         one file for each local worker
    metrics.jsonl    every event, one on a line       summary.json, evaluation.json   what a finished run came to
    address          where its coordinator listens    secrets/      tokens and certificate, if the run made its own
    place.json       only if database or screenshots are elsewhere: where (`dart.store.elsewhere.place`)

What always holds: a directory is made once and never reused for another run; one process at a time works on it
(`lock`), and reading needs no lock.
"""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from dart.config import Config
from dart.errors import UserError, unwritable
from dart.store.database import Database, sqlite_url
from dart.store.elsewhere.place import Place
from dart.store.lock import LEASE_SECONDS, Hold, held, is_held
from dart.store.records import RunRecord, RunState
from dart.store.regular import is_regular, read_regular
from dart.store.schema import OlderSchema

_DATABASE = "run.db"
_PLACE = "place.json"
_MOST_OF_ONE_NAME = 1000
_MOST_OF_ADDRESS = 1000
"""Bytes."""

HERE = "@run"
"""In the words of a command that is kept: the run's directory, wherever it is by then."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One run's directory. Constructing the object does not touch the disk."""

    path: Path

    # ---- what is in it ----

    @property
    def name(self) -> str:
        """The run's id."""
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def database(self) -> Path:
        """The file, unless the database is elsewhere."""
        return self.path / _DATABASE

    @property
    def place_file(self) -> Path:
        return self.path / _PLACE

    @property
    def place(self) -> Place:
        """Where its database and its screenshots are. Raises UserError."""
        return Place.read(self.place_file)

    @property
    def screenshots(self) -> str | Path:
        """The directory or the URL where its screenshots are."""
        return self.place.folder() or self.blobs

    @property
    def lock_file(self) -> Path:
        return self.path / "run.lock"

    @property
    def blobs(self) -> Path:
        return self.path / "blobs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def trackers(self) -> Path:
        return self.path / "trackers"

    @property
    def coordinator_log(self) -> Path:
        return self.path / "coordinator.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def address(self) -> Path:
        """HOST:PORT of the coordinator, for workers that see this directory."""
        return self.path / "address"

    def told_address(self) -> str:
        """Raises OSError if no coordinator has told one."""
        return read_regular(self.path, self.address.name, _MOST_OF_ADDRESS).decode("ascii", "replace").strip()

    def tell_address(self, address: str) -> None:
        """Whole or not at all: workers on other machines look for it."""
        new = self.path / "address.new"
        new.write_text(address, encoding="ascii")
        new.replace(self.address)

    @property
    def secrets(self) -> Path:
        return self.path / "secrets"

    @property
    def dashboard(self) -> Path:
        """The address of the run's dashboard with its token in it, if it asks for one."""
        return self.secrets / "dashboard"

    @property
    def learning_curve(self) -> Path:
        return self.path / "learning_curve.png"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def dataset(self) -> Path:
        return self.path / "dataset" / "train.parquet"

    def checkpoint(self, recorded: str) -> Path:
        """The checkpoint that the database recorded at `recorded`.

        It is found by its name: the run may have been moved, or be opened from another working directory.
        """
        return self.checkpoints / Path(recorded).name

    def command(self, words: Sequence[str]) -> str:
        """A line for a shell, from words in which HERE, also as the first part of a path, means this directory."""
        here = str(self.path)
        return shlex.join(here + word[len(HERE) :] if word.split("/")[0] == HERE else word for word in words)

    # ---- making and finding ----

    @classmethod
    def make(cls, parent: Path, name: str) -> RunDirectory:
        """A new directory, named for the run and the time. Raises UserError when it cannot be made."""
        base = parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(_MOST_OF_ONE_NAME):
            path = base if number == 0 else base.with_name(f"{base.name}-{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise UserError(
                    f"run.directory: {path} cannot be made {unwritable(error, 'choose a writable folder')}"
                ) from None
            return cls(path)
        raise UserError(f"run.directory: {base} and {_MOST_OF_ONE_NAME - 1} others exist: remove some")

    @classmethod
    def at(cls, path: Path) -> RunDirectory:
        """The directory at `path`, with a run or made for one. Raises UserError when it cannot be made."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--run {path} cannot be made {unwritable(error, 'choose a writable folder')}") from None
        return cls(path)

    @classmethod
    def existing(cls, path: Path) -> RunDirectory:
        """The run directory at `path`. Raises UserError when it is not one."""
        found = cls(path)
        if not found.is_run:
            raise UserError(f"{path} is not a run directory: it has no {_DATABASE}; `dart runs` lists them")
        return found

    @classmethod
    def chosen(cls, path: Path | None) -> RunDirectory:
        """The run directory at `path`, or the newest under runs/. Raises UserError when there is none."""
        return cls.existing(path) if path is not None else cls.all_under(Path("runs"))[0]

    @classmethod
    def all_below(cls, parent: Path) -> list[RunDirectory]:
        """Every run directory at any depth below `parent`, newest first. Raises UserError when there is none."""
        parents = set()
        for folder, names, _ in os.walk(parent):
            if cls(Path(folder)).is_run:
                names.clear()  # a run has thousands of folders, and no run in it
                parents.add(Path(folder).parent)
        runs = [run for found in parents for run in cls.all_under(found)]
        if not runs:
            raise UserError(f"no run below {parent}: name a folder with runs, or start one with `dart train`")
        return sorted(runs, key=RunDirectory.began, reverse=True)

    @classmethod
    def all_under(cls, parent: Path) -> list[RunDirectory]:
        """Every run directory directly under `parent`, newest first. Raises UserError when there is none."""
        found = {file.parent for name in (_PLACE, _DATABASE) for file in parent.glob(f"*/{name}")}
        runs = [run for run in map(cls, found) if run.is_run]
        if not runs:
            raise UserError(f"no run under {parent}: name a run directory, or start one with `dart train`")
        return sorted(runs, key=RunDirectory.began, reverse=True)

    def began(self) -> tuple[float, str]:
        """To order runs by: when its config was written, once, and its name. Other files change while it runs."""
        for file in (self.config, self.path):
            with suppress(OSError):
                return file.lstat().st_mtime, self.name
        return 0.0, self.name

    @property
    def is_run(self) -> bool:
        """Some run has begun here. Raises UserError for a directory that cannot be looked into."""
        try:
            self.database.lstat()  # whatever it is: whoever opens it is told
            return True
        except (FileNotFoundError, NotADirectoryError):
            return self._is_elsewhere
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read ({error.strerror}): name a run directory that you may read"
            ) from None

    @property
    def _is_elsewhere(self) -> bool:
        try:
            return bool(self.place.database)
        except UserError:
            return True  # damaged, as whoever opens it is told

    @property
    def is_own(self) -> bool:
        """This user made it: the directory, and what says where the run's parts and its coordinator are."""
        return all(map(_is_mine, (self.path, self.place_file, self.database, *self.beside_database)))

    def read_trusted(self, file: Path, most: int) -> bytes:
        """A token or certificate that the run's config names. A config is no order to whoever looks at the run: the
        file is read where it and the run are this user's (or it is root's, as mounted secrets are), and from
        RUN/secrets where all of that has one owner. Raises OSError."""
        root, named = self.path.resolve(), Path(os.path.abspath(file))  # noqa: PTH100 - links are not followed
        if self.is_own:
            there = named.resolve()
            if there.stat().st_uid in (os.geteuid(), 0):
                return read_regular(there.parent, there.name, most)
        elif named.parent in (self.secrets.absolute(), root / self.secrets.name):
            name = f"{self.secrets.name}/{named.name}"
            if len({(root / part).lstat().st_uid for part in (name, self.secrets.name, "")}) == 1:
                return read_regular(root, name, most)
        raise OSError(errno.EPERM, "it is not this user's, as the run is, and not in RUN/secrets", str(file))

    def settle(self, config: Config) -> None:
        """Keep everything where the config says, from now on. Raises UserError for a run that has begun with its
        database or its screenshots elsewhere."""
        there, run = self.place, config.run
        if self.is_run:
            for name, now, begun in (("database", run.database, there.database), ("blobs", run.blobs, there.blobs)):
                if now != begun:
                    raise UserError(
                        f"run.{name} is {now or 'none'}, and run {self.path} has begun with {begun or 'none'}: set it "
                        "to that, because what is stored there does not move"
                    )
        if (run.database or run.blobs or config.checkpoint.upload) and not (self.is_run and there.key):
            Place.of(self.name, run.database, run.blobs).write(self.place_file)

    def uploads(self, config: Config) -> str | None:
        """Where copies of its checkpoints are, if there are any."""
        return f"{config.checkpoint.upload.rstrip('/')}/{self.place.key}" if config.checkpoint.upload else None

    # ---- opening and locking ----

    async def open(self) -> Database:
        """Its database, with its screenshots, to read what is there. Raises UserError when there is none.

        One of an older schema is migrated first, where no process works on the run.
        """
        self.existing(self.path)
        try:
            return await self._opened(create=False, migrate=False)
        except OlderSchema:
            with self.lock(0.0):
                return await self._opened(create=False, migrate=True)

    async def open_to_work(self, *, create: bool = False) -> Database:
        """The same for the process that holds the lock. `create`: make it where there is none."""
        if not create:
            self.existing(self.path)
        database = await self._opened(create=create, migrate=True)
        try:
            await database.blobs.check("run.blobs")
        except UserError:
            await database.close()
            raise
        return database

    async def _opened(self, *, create: bool, migrate: bool) -> Database:
        url = self.place.url() or sqlite_url(self.database)
        return await Database.open(url, self.screenshots, create=create, migrate=migrate)

    @property
    def write_ahead_log(self) -> Path:
        """SQLite's."""
        return self.path / f"{_DATABASE}-wal"

    @property
    def beside_database(self) -> tuple[Path, ...]:
        """The files that SQLite opens with the database, if they are there."""
        return self.write_ahead_log, *(self.path / f"{_DATABASE}-{part}" for part in ("shm", "journal"))

    def irregular(self) -> list[Path]:
        """Its files that are there and no regular ones, which no reader opens: folders, links, FIFOs, devices."""
        files = (self.config, self.lock_file, self.address, self.metrics, self.summary, self.evaluation)
        return [file for file in (*files, *self.beside_database) if os.path.lexists(file) and not is_regular(file)]

    def lock(self, lease: float = LEASE_SECONDS) -> AbstractContextManager[Hold]:
        """Work on the run alone; `lease` as of `Hold.take`. Raises UserError, on entering, if another process does."""
        return held(self.lock_file, lease)

    def state(self, record: RunRecord) -> str:
        """The run's state. If its process ended without recording why, it was interrupted, whatever its row says."""
        if record.state == RunState.RUNNING and not is_held(self.lock_file):
            return RunState.INTERRUPTED
        return record.state


class Guard:
    """Notices when what a run works on is taken away from under it. Made by the process that holds the lock, when the
    database is open."""

    def __init__(self, directory: RunDirectory, hold: Hold) -> None:
        self.directory, self._hold = directory, hold
        self._local = directory.place.database is None
        self._database = _identity(directory.database)

    @property
    def lock_file(self) -> Path:
        return self.directory.lock_file

    def look(self) -> bool:
        """Whether run.lock was gone and had to be made again. Raises UserError when run.db is another file, or none.

        A PostgreSQL database is not looked for: writing to it fails where it is gone.
        """
        database = self.directory.database
        if self._local and _identity(database) != self._database:
            raise UserError(
                f"{database} was removed or replaced during the run, so what the run has done since then is lost: "
                "restore the run directory from a copy and continue with --resume, or start a "
                "new run"
            )
        return self._hold.renew()


def _is_mine(file: Path) -> bool:
    try:
        return file.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _identity(file: Path) -> tuple[int, int] | None:
    """The file's identity, whatever its name; None if there is no file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
