"""What the dashboard answers, to whom, and that nothing of a run is ever markup."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import httpx
import pytest
from dashboards.made import SMALL, evaluate, event, execute, small_run
from run_processes.short import no_descriptors

from dart.commands.look import dashboard
from dart.commands.look.dashboard import ViewOptions
from dart.dashboard.app import make_dashboard
from dart.dashboard.library import Library
from dart.dashboard.live import Streams
from dart.errors import UserError
from dart.inspection.inspector import Inspector, Pulse
from dart.inspection.opening import RunFiles
from dart.rundir import RunDirectory
from dart.v1 import control_pb2 as cpb
from dart.v1 import control_pb2_grpc

HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    made = small_run(tmp_path_factory.mktemp("made"))
    evaluate(made, "before-greedy-v0", [False] * 10)
    evaluate(made, "after-greedy-v9", [True] * 10, opened=5.0)
    execute(made, ("update trajectories set instruction = ? where id = 'g000001-1'", (HOSTILE,)))
    event(made, 9001, "worker", json.dumps({"worker": HOSTILE, "state": "ready", "slots": 1}))
    return made


def client_of(run: RunDirectory, token: str | None = None, host: str = "127.0.0.1:8700") -> httpx.AsyncClient:
    app = make_dashboard(Library([run.path.parent]), token)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app.app), base_url=f"http://{host}")


@pytest.fixture
async def client(run: RunDirectory) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(run) as made:
        yield made


async def test_a_page_says_what_the_machine_is_short_of_and_not_that_a_file_is_damaged(
    client: httpx.AsyncClient, run: RunDirectory
) -> None:
    here = f"/api/runs/{run.name}"
    for page in (here, f"{here}/trajectories"):
        assert (await client.get(page)).status_code == 200
    trajectory = (await client.get(f"{here}/trajectories", params={"limit": 1})).json()["rows"][0]["id"]
    step = (await client.get(f"{here}/trajectories/{trajectory}")).json()["steps"][0]
    picture = f"{here}/images/{step['image']['sha256']}"
    async with client_of(run) as other:
        with no_descriptors():
            answers = [await client.get(picture), await other.get(here)]
        assert [answer.status_code for answer in (await client.get(picture), await other.get(here))] == [200, 200]
    for answer in answers:
        assert answer.status_code == 503
        assert answer.json()["error"].startswith("too many open files: the limit of this process is")


async def test_a_database_that_cannot_be_opened_now_is_not_called_damaged(run: RunDirectory, tmp_path: Path) -> None:
    """A copy, because SQLite takes a descriptor again that it has of a file which others here have open."""
    async with await RunFiles.open(RunDirectory(Path(shutil.copytree(run.path, tmp_path / run.name)))) as files:
        await files.record()
        files._engine.dispose()
        with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
            await files.record()
        await files.record()


async def test_every_page_has_its_data(client: httpx.AsyncClient, run: RunDirectory) -> None:
    here = f"/api/runs/{run.name}"
    (row,) = (await client.get("/api/runs")).json()
    assert (row["id"], row["trajectories"]) == (run.name, SMALL.trajectories), "without the episodes of evaluations"
    assert (await client.get(here)).json()["config"]["run"]["name"] == "ladder_demo"
    assert (await client.get(f"{here}/status")).json()["live"] is False
    pulse = (await client.get(f"{here}/pulse")).json()
    assert (pulse["last"], pulse["trajectories"], pulse["state"]) == (9001, SMALL.trajectories + 20, row["state"])
    curves = (await client.get(f"{here}/curves")).json()
    assert len(curves["updates"]) == len(curves["series"]["entropy"]) > 3
    assert (await client.get(f"{here}/timeline")).json()["lanes"]
    tasks = (await client.get(f"{here}/tasks")).json()
    assert len(tasks) == SMALL.tasks
    assert (await client.get(f"{here}/tasks/made/{tasks[0]['name']}")).json()["row"] == tasks[0]
    page = (await client.get(f"{here}/trajectories", params={"limit": 5, "kind": "training"})).json()
    detail = (await client.get(f"{here}/trajectories/{page['rows'][0]['id']}")).json()
    assert detail["row"] == page["rows"][0]
    picture = await client.get(f"{here}/images/{detail['steps'][0]['image']['sha256']}")
    assert picture.headers["content-type"] == "image/png"
    assert "immutable" in picture.headers["cache-control"]
    assert (await client.get(f"{here}/groups/{page['rows'][0]['group']}")).json()["members"]
    assert (await client.get(f"{here}/events", params={"kind": "update,sync"})).json()["rows"]
    first, second = (await client.get(f"{here}/sides")).json()
    asked = {
        "first": run.name, "second": run.name,
        "first_evaluation": first["evaluation"], "second_evaluation": second["evaluation"],
    }  # fmt: skip
    compared = (await client.get("/api/compare", params=asked)).json()
    assert (compared["only_second"], compared["difference"]) == (10, 1.0)
    async with client.stream("GET", f"{here}/stream") as stream:
        text = "".join([part async for part in stream.aiter_text()])
    assert "event: status" in text
    assert "event: ended" in text


def test_another_port_is_taken_only_where_none_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(dashboard, "PORT", port)
        with dashboard._listen(ViewOptions()) as listening:
            assert listening.getsockname()[1] != port
        with pytest.raises(UserError, match=f"--port {port} on 127.0.0.1: .*stop the other program"):
            dashboard._listen(ViewOptions(port=port))
    with pytest.raises(UserError, match=r"--host nowhere\.invalid: .*use an address of this machine"):
        dashboard._listen(ViewOptions(host="nowhere.invalid"))


async def test_a_directory_that_was_renamed_is_opened_as_it_is_listed(run: RunDirectory, tmp_path: Path) -> None:
    renamed = RunDirectory(Path(shutil.copytree(run.path, tmp_path / "renamed")))
    async with client_of(renamed) as client:
        (row,) = (await client.get("/api/runs")).json()
        overview = (await client.get(f"/api/runs/{row['id']}")).json()
        assert (row["id"], overview["run"]) == ("renamed", row)


async def test_a_run_that_takes_the_id_of_an_open_one_is_shown_instead(run: RunDirectory, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(run.path, first / "another")
    there = RunDirectory(Path(shutil.copytree(run.path, second / run.name)))
    library = Library([first, second])
    transport = httpx.ASGITransport(make_dashboard(library, None).app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:
        asked = f"/api/runs/{run.name}"
        assert (await client.get(asked)).json()["run"]["directory"] == str(there.path)
        came = shutil.copytree(run.path, first / run.name)
        library._listed = float("-inf")
        await client.get("/api/runs")
        assert (await client.get(asked)).json()["run"]["directory"] == str(came)
    await library.close()


async def test_a_directory_that_is_begun_anew_is_shown_anew(run: RunDirectory, tmp_path: Path) -> None:
    there = RunDirectory(Path(shutil.copytree(run.path, tmp_path / run.name)))
    library = Library([tmp_path])
    async with library.run(run.name) as first:
        shutil.rmtree(there.path)
        shutil.copytree(run.path, there.path)
        execute(there, ("update runs set name = 'another'", ()))
        async with library.run(run.name) as second, library.run(run.name) as third:
            assert second is third is not first
            assert (await second.row()).name == "another"
    assert first.files._threads._shutdown, "closed once nobody used it"
    await library.close()


async def test_each_copy_of_a_run_is_opened_as_it_is_listed(run: RunDirectory, tmp_path: Path) -> None:
    places = [run.path.parent, tmp_path / "a" / "runs", tmp_path / "b" / "runs", tmp_path / "c" / "b" / "runs"]
    for number, place in enumerate(places[1:]):
        execute(
            RunDirectory(Path(shutil.copytree(run.path, place / run.name))),
            ("update runs set name = ?", (f"copy-{number}",)),
        )
    transport = httpx.ASGITransport(make_dashboard(Library(places), None).app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:
        rows = (await client.get("/api/runs")).json()
        end = f"{tmp_path.name}:b:runs"
        ids = [run.name, f"{run.name} (a:runs)", f"{run.name} ({end})", f"{run.name} (c:b:runs)"]
        assert {row["id"]: row["directory"] for row in rows} == {
            id: str(place / run.name) for id, place in zip(ids, places, strict=True)
        }
        for row in rows:
            assert (await client.get(f"/api/runs/{quote(row['id'])}")).json()["run"] == row


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/runs/nobody", 404, "run 'nobody' is not below"),
        ("/api/runs/{run}/trajectories/nobody", 404, "trajectory 'nobody' is not in run"),
        ("/api/runs/{run}/trajectories?limit=many", 400, "limit: 'many' is not a whole number"),
        ("/api/runs/{run}/trajectories?success=maybe", 400, "success: 'maybe' is neither true nor false"),
        ("/api/runs/{run}/events?from=now", 400, "from: 'now' is not a number of seconds"),
        ("/api/runs/{run}/timeline?from=nan", 400, "from: 'nan' is not a number of seconds"),
        ("/api/runs/{run}/episodes?to=inf", 400, "to: 'inf' is not a number of seconds"),
        ("/api/runs/{run}/events?before=99999999999999999999", 400, "is too large a number"),
        ("/api/runs/{run}/images/..%2F..%2Fconfig.yaml", 404, ""),
        ("/api/runs/{run}/trajectories/g000001-1/export.exe", 400, "export.exe is unknown"),
        ("/api/compare?first=x", 400, "first_evaluation is missing"),
        ("/api/nothing", 404, "/api/nothing is not known"),
        ("/assets/nothing.js", 404, "is not known"),
    ],
)
async def test_what_is_not_there_is_told(
    client: httpx.AsyncClient, run: RunDirectory, path: str, status: int, words: str
) -> None:
    answer = await client.get(path.replace("{run}", run.name))
    assert answer.status_code == status
    assert words in answer.json()["error"]


STRANGE = "web/größe 表 100%#1?"


async def test_a_task_may_have_any_name(run: RunDirectory, tmp_path: Path) -> None:
    """An evaluation's groups and trajectories are named after their tasks."""
    there = RunDirectory(Path(shutil.copytree(run.path, tmp_path / run.name)))
    execute(
        there,
        ("update trajectories set id = replace(id, 'task-0000', ?), group_id = replace(group_id, 'task-0000', ?), "
         "task_name = ? where id like 'eval-before%'", (STRANGE, STRANGE, STRANGE)),
        ("update groups set id = replace(id, 'task-0000', ?), task_name = ? where id like 'eval-before%'",
         (STRANGE, STRANGE)),
    )  # fmt: skip
    group = f"eval-before-greedy-v0-{STRANGE}"
    asked = f"/api/runs/{run.name}/trajectories/{quote(group + '-0', safe='')}"
    async with client_of(there) as client:
        detail = (await client.get(asked)).json()
        assert (detail["row"]["id"], detail["row"]["task"]) == (f"{group}-0", STRANGE)
        of_group = (await client.get(f"/api/runs/{run.name}/groups/{quote(group, safe='')}")).json()
        assert len(of_group["members"]) == 10
        exported = await client.get(f"{asked}/export.html")
        assert (exported.status_code, exported.headers["content-type"]) == (200, "text/html; charset=utf-8")
        task = (await client.get(f"/api/runs/{run.name}/tasks/made/{quote(STRANGE, safe='')}")).json()
        assert (task["row"]["trajectories"], sum(point["trajectories"] for point in task["history"])) == (10, 10)


async def test_every_other_path_is_a_page(client: httpx.AsyncClient, run: RunDirectory) -> None:
    for path in ("/", f"/runs/{run.name}", f"/runs/{run.name}/trajectories/g000001-1?step=2", "/compare"):
        answer = await client.get(path)
        assert answer.headers["content-type"].startswith("text/html")
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy.get("script-src", policy["default-src"]) == "'self'"


# ---- streams ----


async def test_a_run_that_somebody_watches_stays_open(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart.dashboard.library.MOST_OPEN", 1)
    for name in "abc":
        shutil.copytree(run.path, tmp_path / name)
        execute(RunDirectory(tmp_path / name), ("update runs set state = 'running'", ()))
    library = Library([tmp_path])
    streams = Streams(library, poll_seconds=0.01)
    with RunDirectory(tmp_path / "a").lock():
        async with asyncio.timeout(60), contextlib.aclosing(streams.stream("a")) as messages:
            assert b"9001" in await until(messages, b"event: events")
            for other in "bc":
                async with library.run(other) as inspector:
                    assert await inspector.tasks()
            told = ("insert into events values (?, 9002, 1.0, 'plan', '{}')", (run.name,))
            execute(RunDirectory(tmp_path / "a"), told)
            assert b"9002" in await until(messages, b"event: events")
    await library.close()


async def until(messages: AsyncIterator[bytes], wanted: bytes) -> bytes:
    async for message in messages:
        if message.startswith(wanted):
            return message
    raise AssertionError(f"the stream ended without {wanted!r}")


async def test_a_stream_whose_poll_fails_ends_so_that_the_page_asks_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: Inspector) -> Pulse:
        raise RuntimeError("nobody expected this")

    monkeypatch.setattr(Inspector, "pulse", broken)
    library = Library([run.path])
    async with asyncio.timeout(60):
        assert [message async for message in Streams(library).stream(run.name)] == [b"retry: 2000\n\n"]
    await library.close()


# ---- exports ----


async def test_a_trajectory_is_exported_as_one_page_that_runs_nothing_of_the_model(
    client: httpx.AsyncClient, run: RunDirectory
) -> None:
    answer = await client.get(f"/api/runs/{run.name}/trajectories/g000001-1/export.html")
    assert answer.headers["content-disposition"] == 'attachment; filename="g000001-1.html"'
    assert HOSTILE not in answer.text
    assert "<script>document.title" not in answer.text
    assert "data:image/png;base64," in answer.text
    assert "http://" not in answer.text.replace("http://www.w3.org", "")


async def test_an_exported_page_knows_whether_its_run_is_over(run: RunDirectory, tmp_path: Path) -> None:
    there = RunDirectory(Path(shutil.copytree(run.path, tmp_path / run.name)))
    execute(there, ("update runs set state = 'running'", ()))
    asked = f"/api/runs/{run.name}/trajectories/g000001-1/export.html"
    async with client_of(there) as client:
        assert '"ended": true}</script>' in (await client.get(asked)).text, "its process has ended"
        with there.lock():
            assert '"ended": false}</script>' in (await client.get(asked)).text


@pytest.mark.parametrize("form", ["gif", "mp4"])
async def test_a_trajectory_is_exported_as_a_film(client: httpx.AsyncClient, run: RunDirectory, form: str) -> None:
    images, av = pytest.importorskip("PIL.Image"), pytest.importorskip("av")
    steps = (await client.get(f"/api/runs/{run.name}/trajectories/g000001-1")).json()["row"]["steps"]
    answer = await client.get(f"/api/runs/{run.name}/trajectories/g000001-1/export.{form}")
    assert answer.status_code == 200, answer.text
    if form == "gif":
        assert images.open(io.BytesIO(answer.content)).n_frames >= steps
    else:
        with av.open(io.BytesIO(answer.content)) as film:
            stream = film.streams.video[0]
            assert sum(1 for _ in film.decode(stream)) >= steps
            assert stream.width >= SMALL.width


# ---- access ----


async def test_a_page_of_another_site_reaches_nothing(run: RunDirectory) -> None:
    async with client_of(run, host="evil.example:8700") as client:
        answer = await client.get("/api/runs")
        assert answer.status_code == 403
        assert "is not this machine" in answer.json()["error"]


FOREIGN = (
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
)


@pytest.mark.parametrize("headers", FOREIGN)
async def test_a_post_from_another_site_is_refused(
    client: httpx.AsyncClient, run: RunDirectory, headers: dict[str, str]
) -> None:
    answer = await client.post(f"/api/runs/{run.name}/pause", headers=headers)
    assert answer.status_code == 403
    own = await client.post(f"/api/runs/{run.name}/pause", headers={"sec-fetch-site": "same-origin"})
    assert own.status_code == 400
    assert "is interrupted: only one that is running can be controlled" in own.json()["error"]


async def test_elsewhere_than_on_loopback_a_token_is_needed(run: RunDirectory) -> None:
    async with client_of(run, token="correct horse", host="gpu-7.example:8700") as client:
        for path in ("/", "/api/runs", "/assets/x.js"):
            assert (await client.get(path)).status_code == 401
        assert (await client.get("/?token=wrong")).status_code == 401
        assert (await client.get("/api/runs", headers={"authorization": "Bearer wrong"})).status_code == 401
        bearer = await client.get("/api/runs", headers={"authorization": "Bearer correct horse"})
        assert bearer.status_code == 200
        entered = await client.get("/runs/x?token=correct+horse&step=2")
        assert (entered.status_code, entered.headers["location"]) == (303, "/runs/x?step=2")
        assert "HttpOnly" in entered.headers["set-cookie"]
        assert "samesite=strict" in entered.headers["set-cookie"].lower()
        assert (await client.get("/api/runs")).status_code == 200
        strange = await client.get("/runs/a%23b%2Fc%3F%25?token=correct+horse")
        assert strange.headers["location"] == "/runs/a%23b%2Fc%3F%25"
        elsewhere = await client.get("//evil.example/?token=correct+horse")
        assert not elsewhere.headers.get("location", "/").startswith("//")


async def test_two_dashboards_of_one_host_keep_their_visitors(run: RunDirectory) -> None:
    hosts = {"gpu-7.example:8700": "one", "gpu-7.example:8701": "two"}
    cookies = httpx.Cookies()  # a browser's, which knows no ports
    for host, token in hosts.items():
        async with client_of(run, token=token, host=host) as client:
            await client.get(f"/?token={token}")
            cookies.update(client.cookies)
    for host, token in hosts.items():
        async with client_of(run, token=token, host=host) as client:
            client.cookies = cookies
            assert (await client.get("/api/runs")).status_code == 200


class Coordinator(control_pb2_grpc.ControlServiceServicer):
    """Notes the tokens that it is sent."""

    def __init__(self) -> None:
        self.tokens: list[object] = []

    def _note(self, context: Any) -> None:
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))

    async def GetStatus(self, request: cpb.GetStatusRequest, context: Any) -> cpb.GetStatusResponse:
        self._note(context)
        return cpb.GetStatusResponse(run_id="run", phase="training")

    async def Pause(self, request: cpb.PauseRequest, context: Any) -> cpb.PauseResponse:
        self._note(context)
        return cpb.PauseResponse()


async def test_each_run_is_asked_with_its_own_token(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DART_TOKEN", "another-run's")
    run = RunDirectory(Path(shutil.copytree(run.path, tmp_path / run.name)))
    coordinator, server, token = Coordinator(), grpc.aio.server(), tmp_path / "control.token"
    control_pb2_grpc.add_ControlServiceServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    config = json.dumps({"server": {"tokens": {"control": f"file:{token}"}}})
    address = f"127.0.0.1:{port}"
    execute(run, ("update runs set state = 'running', control_address = ?, config_json = ?", (address, config)))
    try:
        with run.lock():
            async with client_of(run, token="view") as client, client_of(run) as stranger:
                client.headers["authorization"] = "Bearer view"
                refused = await stranger.post(f"/api/runs/{run.name}/pause")
                assert refused.status_code == 400 and "lets every user of the machine in" in refused.json()["error"]
                for own, sent in ((None, "another-run's"), ("own", "own")):
                    if own:
                        token.write_text(own)
                    assert (await client.get(f"/api/runs/{run.name}/status")).json()["live"]
                    assert (await client.post(f"/api/runs/{run.name}/pause")).status_code == 200
                    assert coordinator.tokens == [f"Bearer {sent}"] * 2
                    coordinator.tokens.clear()
    finally:
        await server.stop(None)


async def test_no_secret_is_sent(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DART_TOKEN", "control-secret-1")
    async with client_of(run, token="view-secret-2") as client:
        client.headers["authorization"] = "Bearer view-secret-2"
        for path in ("", "/status", "/curves", "/events", "/tasks"):
            text = (await client.get(f"/api/runs/{run.name}{path}")).text
            assert "control-secret-1" not in text
            assert "view-secret-2" not in text


def test_assets_are_small() -> None:
    static = Path("dart/dashboard/static")
    size = sum(len(gzip.compress(file.read_bytes())) for file in static.rglob("*") if file.is_file())
    assert size < 1.5e6
