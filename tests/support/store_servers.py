"""Where tests keep a run: in its directory, or in a real PostgreSQL and a real S3-compatible store, started once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import URL

from benchmarks.stores.servers import ObjectStore, PostgreSQL, no_object_store, no_postgresql, object_store, postgresql
from dart.store.database import Database, sqlite_url
from dart.store.elsewhere.place import Place


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgreSQL]:
    if why := no_postgresql():
        pytest.skip(why)
    with postgresql("fsync=off") as server:
        yield server


@pytest.fixture(scope="session")
def object_store_server() -> Iterator[ObjectStore]:
    if why := no_object_store():
        pytest.skip(why)
    with object_store() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@dataclass(frozen=True, slots=True)
class Stores:
    """A database and a place for screenshots, for one test."""

    database: URL | str
    blobs: str

    @property
    def arguments(self) -> tuple[str, str]:
        """For another process."""
        url = self.database if isinstance(self.database, str) else self.database.render_as_string(hide_password=False)
        return url, self.blobs

    async def open(self, *, create: bool = True) -> Database:
        return await Database.open(self.database, self.blobs, create=create)


@pytest.fixture(params=["sqlite, directory", "postgresql, directory", "postgresql, s3"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    return _stores(request, tmp_path, *request.param.split(", "))


@pytest.fixture
def s3_url(object_store_server: ObjectStore) -> str:
    """An empty folder."""
    return f"{object_store_server.url}/{os.urandom(8).hex()}"


def _stores(request: pytest.FixtureRequest, folder: Path, database: str, blobs: str) -> Stores:
    url: URL | str | None = sqlite_url(folder / "dart.db")
    if database == "postgresql":
        url = Place.of("test", request.getfixturevalue("postgresql_server").url, None).url()
    assert url is not None
    where = request.getfixturevalue("s3_url") if blobs == "s3" else str(folder / "blobs")
    return Stores(url, where)
