"""Run directories that somebody left to hang the dashboard, to read this user's files, or to hide the other runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import grpc
import httpx
import pytest
from dashboards.hostile import hostile_runs
from dashboards.made import Shape, event, execute, small_run
from dashboards.served import viewing

from dart.dashboard.app import make_dashboard
from dart.dashboard.library import Library
from dart.errors import UserError
from dart.inspection import runs
from dart.inspection.condition import MOST_OF_EVENT, reach
from dart.inspection.curves import MOST_SERIES
from dart.inspection.opening import RunFiles, shown, told
from dart.inspection.runs import Kept, rows_of
from dart.inspection.tokens import find_tokenizer
from dart.processes import http
from dart.rundir import RunDirectory

SECRET = "a-line-of-another-file"
TINY = Shape(trajectories=16, steps=2, tasks=1, width=32, height=20)
GUARD_SECONDS = 120.0
NOBODY = 65534


ROWS = {
    r"(fifo|link|zero|folder)-run_db": "run.db is no regular file",
    r"(short|sparse)-run_db": "file is not a database",
    r"(fifo|link|zero|folder)-place_json": "place.json is damaged .it is no regular file",
    r"short-place_json": "place.json is damaged .Expecting value",
    r"sparse-place_json": "place.json is damaged .it has more than 65,536 bytes",
    r"place-15": "place.json is damaged .database is 5, and no text",
    r"place-16": "place.json is damaged .it is no object",
    r"place-(24|64)": "place.json is another user's, and names|cannot be read|not a URL|is not set",
    r"place-35": "is another user's, and names|",
    r"view-.*": "it has a view .*, which no database of dart has",
    r"trigger": "it has a trigger 't', which no database of dart has",
    r".*-dart_schema-version|empty-dart_schema": "has schema version .* it is not a dart database",
    r"empty-runs": "holds no run: it ended before it began",
    r"large-runs-config_json": "string or blob too big",
    r"deep-runs-.*": "its JSON is nested deeper than 100 levels",
    r".*-runs-(name|control_address)": "its (name|control_address) is no text",
    r".*-runs-(started|finished)": "its time (started|finished) is ",
    r".*-runs-(state|kind)": "is not a valid Run(State|Kind)",
    # Rows that belong to no run, or to another, are nobody's; one that is not there is not missed.
    r"text-runs-id|empty-trajectories|.*-trajectories-run_id|whole-groups-kind": "",
}
"""By the kinds of hostile runs, what their rows say."""
TOLD = {
    r"(fifo|link|zero|folder)-(run_lock|address|config_yaml|summary_json)": ("", "is no regular file"),
    r"(fifo|link|zero|folder)-run_db-(shm|journal)": ("", "is no regular file"),
    r"(fifo|link|zero|folder)-run_db-wal": ("", "run.db-wal was not read"),
    r"blobs-elsewhere|folder-blobs": ("", "screenshots that were looked for are not in"),
    r"(missing|short|fifo|zero)-blobs": ("", "blobs is not there"),
    r"text-groups-planned|huge-groups-suite": ("/tasks", "is damaged: .*field_name='(rollouts|suite)"),
    r"(huge|whole)-groups-(fate|kind|state)": ("/groups/g000001", "is damaged: .*field_name"),
    r"text-groups-consumed_by_update": ("/groups/g000001", "is damaged: .*field_name"),
    r"(whole|text)-steps-(logprobs|text|prompt_token_ids)": ("/trajectories/g000001-1", "run.db is damaged: "),
    r"(deep|broken)-(trajectories|steps)-more_json": ("/trajectories/g000001-1", "run.db is damaged: "),
    r"huge-events-kind": ("/events", "is damaged: .*field_name='kind'"),
    r"config": ("/tasks", "is damaged: "),
    r"name-.*": ("", '"problem":""'),
}  # fmt: skip
"""By the kinds of hostile runs, the page that says what is wrong, and its words."""
PAGES = ("", "/status", "/curves", "/timeline", "/tasks", "/trajectories", "/trajectories/g000001-1",
         "/groups/g000001", "/events")  # fmt: skip


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


def given_away(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, but: Path | None = None) -> None:
    """The directory is another user's from now on, for whoever asks; `but`, if a name in it is this file's, is not."""
    if os.geteuid() == 0:
        for folder, folders, files in os.walk(run.path):
            for one in (Path(folder), *(Path(folder) / name for name in (*folders, *files))):
                if not (but and but.exists() and one.is_file() and one.samefile(but)) or one.is_symlink():
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
        assert set(rows) == {good.name, *(shown(run.name) for run in made if run.name != "missing-run_db")}
        for kind in (*ROWS, *TOLD):
            assert any(re.fullmatch(kind, name) for name in rows), f"no run is {kind}"
        for name, row in rows.items():
            words = next((words for kind, words in ROWS.items() if re.fullmatch(kind, name)), None)
            if words is None:  # what was changed is nothing that a row shows
                assert (row["problem"], row["trajectories"]) == ("", TINY.trajectories), name
            else:
                assert re.search(words, row["problem"]) or (not words and not row["problem"]), (name, row["problem"])
        assert client.get("/metrics").status_code == 200
        for run in rows:
            answers = {page: client.get(f"/api/runs/{quote(run, safe='')}{page}") for page in PAGES}
            for page, answer in answers.items():
                assert answer.status_code in (200, 400, 404) and SECRET not in answer.text, (run, page)
            for kind, (page, words) in TOLD.items():
                if re.fullmatch(kind, run):
                    assert re.search(words, answers[page].text), (run, page, answers[page].text)
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
        with pytest.raises(UserError, match=r"takes more than 0\.2 s of the processor"):
            await files.read(lambda connection: connection.exec_driver_sql(endless).all())
    files = await RunFiles.open(good, seconds=1e9)
    reading = asyncio.ensure_future(files.read(lambda connection: connection.exec_driver_sql(endless).all()))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(GUARD_SECONDS):
        await files.close()
        with pytest.raises(UserError, match="interrupted"):
            await reading


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("update runs set config_json = ?", ('{"a":[' + "{}," * 1_000_000 + "0]}",)), "more than 200,000 values"),
        (("update runs set name = ?", ("a" * 1_000_000,)), "its name has more than 1,000 characters"),
        (("alter table groups add column heavy as (hex(zeroblob(1000000)))", ()), "it has a computed column 'heavy'"),
    ],
)
async def test_what_would_take_long_is_refused_before_it_does(
    good: RunDirectory, change: tuple[str, tuple[str, ...]], words: str
) -> None:
    execute(good, change)
    (row,) = await rows_of([good])
    assert words in row.problem


async def test_of_what_updates_and_stalls_say_no_more_is_read_than_dart_writes(good: RunDirectory) -> None:
    numbers = json.dumps({"update": 99, **{f"n{number:05}": 1.0 for number in range(5000)}})
    event(good, 9001, "update", numbers)
    for sequence, culprit in ((9002, "x" * MOST_OF_EVENT), (9003, "the trainer")):
        stall = {"kind": "update", "waits": "an update", "waits_for": "it", "seconds": 9.0, "culprit": culprit}
        event(good, sequence, "stalled", json.dumps(stall))
    async with client_of(good) as client:
        curves = (await client.get(f"/api/runs/{good.name}/curves")).json()
        status = (await client.get(f"/api/runs/{good.name}/status")).json()
    assert "n00000" in curves["series"] and len(curves["series"]) == MOST_SERIES
    assert [stall["culprit"] for stall in status["status"]["stalls"]] == ["the trainer"]


async def test_a_database_that_another_program_keeps_locked_is_neither_read_nor_waited_for(good: RunDirectory) -> None:
    with closing(sqlite3.connect(good.database, isolation_level=None)) as locked:
        locked.execute("pragma journal_mode=delete")
        locked.execute("begin exclusive")
        async with asyncio.timeout(GUARD_SECONDS):
            (row,) = await rows_of([good])
        assert "database is locked): look again" in row.problem
    assert (await rows_of([good]))[0].problem == ""


async def test_a_run_that_takes_too_long_is_read_for_the_list_only_when_it_has_changed(
    good: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 9000) select i, 'a' from n"
    execute(good, ("drop table groups", ()), (f"create table groups as {many}", ()))
    execute(good, ("drop table trajectories", ()), (f"create table trajectories as {many}", ()))
    execute(good, ("alter table trajectories rename column i to run_id", ()))
    kept: Kept = {}
    for seconds in (0.0, 60.0):
        monkeypatch.setattr(runs, "LISTED_SECONDS", seconds)
        (row,) = await rows_of([good], kept)
        assert "takes more than 0 s of the processor" in row.problem
    os.utime(good.database, (1, 1))
    (row,) = await rows_of([good], kept)
    assert "takes more" not in row.problem


async def test_what_place_json_says_later_changes_nothing_for_a_run_that_is_open(good: RunDirectory) -> None:
    async with await RunFiles.open(good) as files:
        good.place_file.write_text(json.dumps({"blobs": "file:///", "key": "etc"}))
        assert (await files.record()).id == files.run_id and files.screenshots == good.blobs
        good.place_file.write_text("{")
        assert (await files.record()).id == files.run_id


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


class Coordinator(grpc.GenericRpcHandler):
    """It answers nothing, and keeps what tokens it is sent."""

    def __init__(self) -> None:
        self.sent: list[str | bytes | None] = []

    def service(self, details: grpc.HandlerCallDetails) -> None:
        self.sent.append(dict(details.invocation_metadata).get("authorization"))


@pytest.fixture
async def coordinator() -> AsyncIterator[tuple[Coordinator, str]]:
    server, found = grpc.aio.server(), Coordinator()
    server.add_generic_rpc_handlers((found,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield found, f"127.0.0.1:{port}"
    await server.stop(0)


def _linked(secrets: Path, marker: Path) -> None:
    (secrets / "control").symlink_to(marker)


def _linked_hard(secrets: Path, marker: Path) -> None:
    (secrets / "control").hardlink_to(marker)


def _linked_folder(secrets: Path, marker: Path) -> None:
    secrets.rmdir()
    secrets.symlink_to(marker.parent)
    marker.rename(marker.with_name("control"))


@pytest.mark.parametrize("put", [_linked, _linked_hard, _linked_folder])
async def test_a_coordinator_that_another_users_run_names_is_sent_no_token_of_this_users(
    good: RunDirectory,
    marker: Path,
    coordinator: tuple[Coordinator, str],
    put: Callable[[Path, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DART_TOKEN", "of-this-user")
    there, address = coordinator
    token = good.secrets / "control"
    running(good, address, server={"tokens": {"control": f"file:{token}"}})
    here = f"/api/runs/{good.name}"

    async def look() -> set[str | bytes | None]:
        there.sent.clear()
        async with client_of(good) as client:
            for page in (f"{here}/status", "/metrics"):
                assert (await client.get(page)).status_code == 200
            await client.post(f"{here}/pause")
        return set(there.sent)

    with good.lock(0.0):
        assert await look() == {"Bearer of-this-user"}, "the run is this user's"
        good.secrets.mkdir()
        put(good.secrets, marker)
        given_away(good, monkeypatch, but=marker)
        assert await look() == {None}
        if put is not _linked_folder:
            token.unlink()
            token.write_text("of-the-run\n")
            given_away(good, monkeypatch)
            assert await look() == {"Bearer of-the-run"}, "a token that the run's own user has put there"


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
