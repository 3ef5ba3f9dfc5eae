"""Run directories that somebody left to hang the dashboard, to read this user's files, or to hide the other runs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from dashboards.hostile import hostile_runs
from dashboards.made import Shape, execute, small_run
from dashboards.served import viewing

from dart.dashboard.app import make_dashboard
from dart.dashboard.library import Library
from dart.errors import UserError
from dart.inspection.condition import reach
from dart.inspection.opening import RunFiles, told
from dart.inspection.tokens import find_tokenizer
from dart.processes import http
from dart.rundir import RunDirectory

SECRET = "a-line-of-another-file"
TINY = Shape(trajectories=16, steps=2, tasks=1, width=32, height=20)
GUARD_SECONDS = 120.0
NOBODY = 65534


@pytest.fixture
def good(tmp_path: Path) -> RunDirectory:
    (tmp_path / "runs").mkdir()
    return small_run(tmp_path / "runs", TINY)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    file = tmp_path / "elsewhere" / "tokenizer.json"
    file.parent.mkdir()
    file.write_text(SECRET)
    return file


def running(run: RunDirectory, address: str, **config: object) -> None:
    execute(
        run,
        ("update runs set state = 'running', control_address = ?, config_json = ?", (address, json.dumps(config))),
    )


def given_away(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is another user's from now on, for whoever asks."""
    if os.geteuid() == 0:
        for folder, _, files in os.walk(run.path):
            for one in (folder, *(str(Path(folder) / file) for file in files)):
                os.chown(one, NOBODY, NOBODY, follow_symlinks=False)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def test_hostile_runs_hide_no_other_run_and_show_no_other_file(
    good: RunDirectory, marker: Path, tmp_path: Path
) -> None:
    made = hostile_runs(good, good.path.parent, marker, all_values=False)
    assert len(made) >= 100
    with viewing(good.path.parent) as address, httpx.Client(base_url=address, timeout=GUARD_SECONDS) as client:
        rows = {row["id"]: row for row in client.get("/api/runs").json()}
        assert (rows[good.name]["problem"], rows[good.name]["trajectories"]) == ("", TINY.trajectories)
        assert any(name.startswith("name-\\xff") for name in rows)
        for name in ("view-runs", "fifo-run_db", "folder-place_json", "large-runs-config_json"):
            assert rows[name]["problem"], name
        assert client.get("/metrics").status_code == 200
        for run in ("fifo-run_lock", "zero-place_json", "view-trajectories", "blobs-elsewhere"):
            here = f"/api/runs/{quote(run, safe='')}"
            for page in ("", "/status", "/curves", "/timeline", "/trajectories", "/trajectories/g000001-1", "/events"):
                answer = client.get(here + page)
                assert answer.status_code in (200, 400, 404) and SECRET not in answer.text, (run, page)
    listed = subprocess.run(
        [sys.executable, "-m", "dart", "runs", str(good.path.parent)],
        capture_output=True, text=True, timeout=GUARD_SECONDS, check=True,
    )  # fmt: skip
    assert good.name in listed.stdout and "view-runs" in listed.stdout and SECRET not in listed.stdout


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": "\\ud800"}', '{"a": ' + "[" * 9999 + "]" * 9999 + "}"])
async def test_damaged_evidence_costs_no_page(good: RunDirectory, text: str) -> None:
    execute(good, ("update trajectories set evidence_json = ?", (text,)))
    async with client_of(good) as client:
        answer = await client.get(f"/api/runs/{good.name}/trajectories/g000001-1")
    assert answer.status_code == 200 and answer.json()["evidence"]


def test_the_log_has_where_damage_was_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "dart.inspection.opening")
    with pytest.raises(UserError, match="the page is damaged: KeyError"), told("the page"):
        {}["none"]
    assert [record.exc_info and record.exc_info[0] for record in caplog.records] == [KeyError]


async def test_an_endless_view_ends(good: RunDirectory) -> None:
    columns = ", ".join(f"i as {name}" for name in ("id", "name", "started"))
    endless = f"with recursive n(i) as (select 1 union all select i + 1 from n) select {columns} from n"
    execute(good, ("alter table runs rename to hidden", ()), (f"create view runs as {endless}", ()))
    async with asyncio.timeout(GUARD_SECONDS), client_of(good) as client:
        (row,) = (await client.get("/api/runs")).json()
    assert "view 'runs'" in row["problem"]


async def test_a_query_without_an_end_is_ended(good: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
    async with await RunFiles.open(good, seconds=0.2) as files, asyncio.timeout(GUARD_SECONDS):
        with pytest.raises(UserError, match="interrupted"):
            await files.read(lambda connection: connection.exec_driver_sql(endless).all())
    files = await RunFiles.open(good, seconds=1e9)
    reading = asyncio.ensure_future(files.read(lambda connection: connection.exec_driver_sql(endless).all()))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(GUARD_SECONDS):
        await files.close()
        with pytest.raises(UserError, match="interrupted"):
            await reading


def client_of(run: RunDirectory) -> httpx.AsyncClient:
    app = make_dashboard(Library([run.path.parent]), None)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app.app), base_url="http://127.0.0.1:8700")


async def test_another_users_run_is_sent_no_token_and_opens_no_file_of_this_user(
    good: RunDirectory, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DART_TOKEN", "of-this-user")
    running(good, "127.0.0.1:1", server={"tokens": {"control": f"file:{marker}"}}, model={"path": str(marker.parent)})

    async def token() -> str | None:
        async with await RunFiles.open(good) as files:
            return reach(good, await files.record()).token

    assert await token() == SECRET, "the run and the file are this user's"
    given_away(good, monkeypatch)
    assert await token() is None
    async with await RunFiles.open(good) as files:
        assert find_tokenizer(good, (await files.record()).config) is None


async def test_another_users_run_names_no_place_that_is_asked_with_this_users_keys(
    good: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good.place_file.write_text(json.dumps({"database": "postgresql://127.0.0.1:1/none", "key": "k"}))
    given_away(good, monkeypatch)
    async with client_of(good) as client:
        (row,) = (await client.get("/api/runs")).json()
    assert "is another user's" in row["problem"]


async def test_a_link_in_place_of_screenshots_is_not_followed(good: RunDirectory, tmp_path: Path) -> None:
    (picture,) = list(good.blobs.glob("*/*"))[:1]
    async with client_of(good) as client:
        assert (await client.get(f"/api/runs/{good.name}/images/{picture.name}")).status_code == 200
        shutil.move(good.blobs, tmp_path / "outside")
        good.blobs.symlink_to(tmp_path / "outside")
        assert (await client.get(f"/api/runs/{good.name}/images/{picture.name}")).status_code == 404


# ---- the server ----


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"ok"})  # type: ignore[operator]

    monkeypatch.setattr(http, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(http, "MOST_WAITING", 8)
    server = http.HttpServer(app)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.ensure_future(server.serve(sockets=[listening]))
        yield listening.getsockname()[1]
        server.should_exit = True
        await task


async def ended(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(GUARD_SECONDS):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nhost: a\r\n"])
async def test_a_request_whose_head_never_ends_is_ended(port: int, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    assert await ended(reader) == b""
    writer.close()


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nx: "])
async def test_a_head_that_is_too_large_is_refused_before_it_ends(port: int, start: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start + b"a" * (4 * http.MOST_HEAD))
    answer = await ended(reader)
    assert answer == b"" or b" 400 " in answer
    writer.close()


async def test_of_many_unfinished_requests_the_oldest_are_ended_and_a_whole_one_is_answered(port: int) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    async with httpx.AsyncClient(timeout=GUARD_SECONDS) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/")).text == "ok"
    for reader, _ in opened:
        assert await ended(reader) == b""
    for _, writer in opened:
        writer.close()
