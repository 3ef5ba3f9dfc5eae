"""A PostgreSQL server and an S3-compatible object store on this machine, for a test or a benchmark, in a folder that is
removed afterwards.

PostgreSQL is Debian's. It refuses to run as root, so root starts it as the user nobody. The object store is moto's
server, which keeps everything in memory: it speaks S3's protocol, and says nothing about the speed of a real one.
`make stores` installs both.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dart.wire.channel import free_port

INSTALL = "`make stores` installs it"
START_SECONDS = 240
PASSWORD = "of-tests"
_USER = "nobody"


def no_postgresql() -> str | None:
    """Why there can be no PostgreSQL here; None where there can."""
    if _programs() is None:
        return f"PostgreSQL is not installed: {INSTALL}"
    return _lacking("psycopg")


def no_object_store() -> str | None:
    """Why there can be no object store here; None where there can."""
    return _lacking("moto") or _lacking("flask") or _lacking("s3fs")


def _lacking(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed: {INSTALL}"


def _programs() -> Path | None:
    """The folder of the newest version's programs."""
    if found := shutil.which("initdb"):
        return Path(found).parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return versions[-1].parent if versions else None


@dataclass(slots=True)
class PostgreSQL:
    folder: Path
    port: int
    settings: tuple[str, ...]

    @property
    def url(self) -> str:
        """By its socket, without a password."""
        return f"postgresql://dart@/postgres?host={self.folder}&port={self.port}"

    @property
    def url_by_network(self) -> str:
        """It asks for the password."""
        return f"postgresql://dart@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = [f"-p {self.port}", f"-k {self.folder}", "-h 127.0.0.1", *(f"-c {one}" for one in self.settings)]
        self._call("pg_ctl", "start", "-w", "-l", str(self.folder / "log"), "-o", " ".join(options))

    def stop(self) -> None:
        self._call("pg_ctl", "stop", "-w", "-m", "fast")

    def make(self) -> None:
        (self.folder / "password").write_text(PASSWORD)
        self._call("initdb", "-U", "dart", "-E", "UTF8", "--auth-local=trust", "--auth-host=scram-sha-256",
                   f"--pwfile={self.folder / 'password'}", "--no-sync")  # fmt: skip

    def _call(self, program: str, *arguments: str) -> None:
        programs = _programs()
        assert programs is not None, INSTALL
        subprocess.run(
            [programs / program, "-D", self.folder / "data", *arguments], cwd=self.folder, check=True,
            timeout=START_SECONDS, stdout=subprocess.DEVNULL, user=_USER if os.geteuid() == 0 else None,
        )  # fmt: skip


@contextmanager
def postgresql(*settings: str) -> Iterator[PostgreSQL]:
    """A server with these settings, as in `fsync=off`."""
    with tempfile.TemporaryDirectory(prefix="dart-pg-") as folder:
        if os.geteuid() == 0:
            os.chown(folder, pwd.getpwnam(_USER).pw_uid, -1)
        server = PostgreSQL(Path(folder), free_port(), settings)
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop()


@dataclass(frozen=True, slots=True)
class ObjectStore:
    endpoint: str
    bucket: str = "dart-tests"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs in order to reach it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": "of", "AWS_SECRET_ACCESS_KEY": PASSWORD,
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server with an empty bucket."""
    port = free_port()
    store = ObjectStore(f"http://127.0.0.1:{port}")
    with subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as server:  # fmt: skip
        try:
            _until_it_answers(store.endpoint)
            # moto needs no signature to make a bucket.
            request = urllib.request.Request(f"{store.endpoint}/{store.bucket}", method="PUT")
            urllib.request.urlopen(request, timeout=START_SECONDS).close()
            yield store
        finally:
            server.terminate()


def _until_it_answers(address: str) -> None:
    give_up = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(address, timeout=START_SECONDS).close()
            return
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)
