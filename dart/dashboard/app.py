"""The routes: each page's record as JSON, screenshots, streams, exports, and the pages themselves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dart.core.status import Status
from dart.dashboard.access import Access
from dart.dashboard.exports import FORMS, export
from dart.dashboard.library import MOST_OPEN, Library
from dart.dashboard.live import Streams
from dart.dashboard.metrics import exposition
from dart.errors import UserError
from dart.inspection import records as r
from dart.inspection.condition import ask, dial_of
from dart.inspection.inspector import Inspector, compare
from dart.inspection.opening import NotFound, shown, told
from dart.shortage import shortage
from dart.store.records import RunState
from dart.wire.levers import LEVERS, pull
from dart.wire.status import status_from_proto

STATIC = Path(__file__).parent / "static"
SMALLEST_ZIPPED = 2048
SCRAPE_SECONDS, LEAST_SECONDS = 1.5, 0.5
"""From the beginning of a scrape until coordinators must have answered, and how long each has at least. Prometheus
gives a scrape up after 10 s unless told otherwise."""
FOR_EVER = "public, max-age=31536000, immutable"
MOST_WHOLE = 2**63 - 1
"""The largest number that a database takes."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """The application with what it shares between requests."""

    library: Library
    streams: Streams
    app: Starlette

    async def close(self) -> None:
        self.streams.end()
        await self.library.close()


def make_dashboard(library: Library, token: str | None) -> Dashboard:
    """`token` None: only this machine may ask (`access`)."""
    streams = Streams(library)
    handlers = _Handlers(library, streams, open_here=token is None)
    app = Starlette(
        routes=handlers.routes(),
        middleware=[Middleware(Access, token=token), Middleware(GZipMiddleware, minimum_size=SMALLEST_ZIPPED)],
        exception_handlers={
            NotFound: _not_found,
            UserError: _bad_request,
            BadQuery: _bad_request,
            **dict.fromkeys((OSError, MemoryError, RuntimeError), _short),
        },
    )
    return Dashboard(library, streams, app)


async def _short(_: Request, error: Exception) -> Response:
    """What this machine is short of at the moment, without another thread; everything else stays what it is."""
    if not (short := shortage(error)):
        raise error
    return JSONResponse({"error": short}, status_code=503)


class BadQuery(ValueError):
    """A parameter with a value of the wrong kind; the message names it."""


def _not_found(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": shown(str(error))}, status_code=404)


def _bad_request(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": shown(str(error))}, status_code=400)


Handler = Callable[[Request], Awaitable[Response]]


class _Handlers:
    def __init__(self, library: Library, streams: Streams, *, open_here: bool) -> None:
        """`open_here`: every user of this machine may ask."""
        self._library, self._streams, self._open_here = library, streams, open_here

    def routes(self) -> list[Route]:
        run = "/api/runs/{run}"
        of_run: Mapping[str, Callable[[Inspector, Request], Awaitable[object]]] = {
            "": lambda it, _: it.overview(),
            "/status": lambda it, _: it.status(),
            "/pulse": lambda it, _: it.pulse(),
            "/curves": lambda it, _: it.curves(),
            "/timeline": lambda it, request: it.timeline(_real(request, "from"), _real(request, "to")),
            "/episodes": lambda it, request: it.episodes(
                _real(request, "from") or 0.0, _real(request, "to") or math.inf
            ),
            "/tasks": lambda it, _: it.tasks(),
            "/tasks/{suite}/{name:path}": lambda it, request: it.task(
                request.path_params["suite"], request.path_params["name"]
            ),
            "/trajectories": _trajectories,
            "/trajectories/{id:path}": lambda it, request: it.trajectory(request.path_params["id"]),
            "/groups/{id:path}": lambda it, request: it.group(request.path_params["id"]),
            "/events": _events,
            "/sides": lambda it, _: it.sides(),
        }
        return [
            Route("/api/runs", self._runs),
            Route("/metrics", self._metrics),
            Route("/api/compare", self._compare),
            Route(run + "/images/{sha256}", self._image),
            Route(run + "/stream", self._stream),
            Route(run + "/trajectories/{id:path}/export.{form}", self._export),
            Route(run + "/{lever}", self._lever, methods=["POST"]),
            *(Route(run + path, self._page(ask)) for path, ask in of_run.items()),
            Route("/api/{rest:path}", _no_such_route),
            Route("/assets/{name}", _asset),
            Route("/{rest:path}", _index),
        ]

    def _page(self, ask: Callable[[Inspector, Request], Awaitable[object]]) -> Handler:
        async def handler(request: Request) -> Response:
            async with self._library.run(request.path_params["run"]) as inspector:
                found = await ask(inspector, request)
                with told(f"what is shown here of run {inspector.files.id}"):
                    return await _answer(found)

        return handler

    async def _runs(self, _: Request) -> Response:
        return await _answer(await self._library.rows())

    async def _metrics(self, _: Request) -> Response:
        until = time.monotonic() + SCRAPE_SECONDS
        rows = await self._library.rows()
        running = [row.id for row in rows if row.state == RunState.RUNNING]
        turn = asyncio.Semaphore(MOST_OPEN)
        asked = await asyncio.gather(*(self._status(run, turn, until) for run in running))
        silent = [run for run, status in zip(running, asked, strict=True) if status is None]
        unreadable = [row.id for row in rows if row.problem] + silent
        live = [status for status in asked if status is not None]
        return Response(exposition(live, unreadable), media_type=CONTENT_TYPE_LATEST)

    async def _status(self, run: str, turn: asyncio.Semaphore, until: float) -> Status | None:
        """None for a run that does not answer. All are asked at once, and no run is kept open meanwhile."""
        try:
            with told(f"the status of run {run}"):
                async with turn, self._library.run(run) as inspector:
                    dial = await dial_of(inspector.files)
                answer = await ask(dial, max(LEAST_SECONDS, until - time.monotonic()))
                # The id of its page: two runs that are watched may have one name.
                return None if answer is None else replace(status_from_proto(answer), run_id=run)
        except UserError:
            return None

    async def _compare(self, request: Request) -> Response:
        asked = [_required(request, name) for name in ("first", "first_evaluation", "second", "second_evaluation")]
        async with self._library.run(asked[0]) as first, self._library.run(asked[2]) as second:
            compared = await compare(first, asked[1], second, asked[3])
            with told(f"what is shown here of runs {first.files.id} and {second.files.id}"):
                return await _answer(compared)

    async def _image(self, request: Request) -> Response:
        async with self._library.run(request.path_params["run"]) as inspector:
            data, media_type = await inspector.image(request.path_params["sha256"])
        headers = {"cache-control": FOR_EVER, "content-encoding": "identity"}  # pictures are compressed already
        return Response(data, media_type=media_type, headers=headers)

    async def _stream(self, request: Request) -> Response:
        run = request.path_params["run"]
        async with self._library.run(run):
            pass  # one that is not there is told before the stream begins
        # "identity": older versions of starlette compress streams, and keep what they send back until there is enough.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", "content-encoding": "identity"}
        messages = _until_closed(self._streams.stream(run))
        return StreamingResponse(messages, media_type="text/event-stream", headers=headers)

    async def _export(self, request: Request) -> Response:
        form = request.path_params["form"]
        if form not in FORMS:
            raise BadQuery(f"export.{form} is unknown: use {', '.join(f'export.{name}' for name in FORMS)}")
        async with self._library.run(request.path_params["run"]) as inspector:
            detail = await inspector.trajectory(request.path_params["id"])
            data = await export(inspector, detail, form)
        # A header holds Latin letters alone, and the name of a task may be in any script.
        name = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in detail.row.id)
        headers = {"content-disposition": f'attachment; filename="{name}.{form}"'}
        return Response(data, media_type=FORMS[form], headers=headers)

    async def _lever(self, request: Request) -> Response:
        lever = request.path_params["lever"]
        if lever not in LEVERS:
            raise NotFound(f"{lever} is not a lever of a run: use {', '.join(LEVERS)}")
        async with self._library.run(request.path_params["run"]) as inspector:
            dial = await dial_of(inspector.files)
            if dial.token and self._open_here:
                raise UserError(
                    "this run asks for a control token, and this dashboard lets every user of the machine in: start "
                    "`dart view` with DART_VIEW_TOKEN set, or use `dart control`"
                )
            return JSONResponse({"done": await pull(dial, lever)})


async def _until_closed(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Close the stream's generator when the client goes, so that its poll ends with it."""
    async with contextlib.aclosing(messages):  # type: ignore[type-var]
        async for message in messages:
            yield message


def _trajectories(inspector: Inspector, request: Request) -> Awaitable[object]:
    query = request.query_params
    success = {"": None, "true": True, "false": False}.get(query.get("success", ""), BadQuery)
    if success is BadQuery:
        raise BadQuery(f"success: {query['success'][:40]!r} is neither true nor false")
    return inspector.trajectories(
        kind=query.get("kind", ""),
        suite=query.get("suite", ""),
        task=query.get("task", ""),
        success=success,  # type: ignore[arg-type]
        fate=query.get("fate", ""),
        after=query.get("after", ""),
        limit=_whole(request, "limit", 100),
    )


def _events(inspector: Inspector, request: Request) -> Awaitable[object]:
    query = request.query_params
    return inspector.events(
        kinds=tuple(kind for kind in query.get("kind", "").split(",") if kind),
        text=query.get("text", ""),
        worker=query.get("worker", ""),
        task=query.get("task", ""),
        start=_real(request, "from"),
        end=_real(request, "to"),
        before=_whole(request, "before", 0),
        limit=_whole(request, "limit", 100),
    )


def _whole(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, "")
    try:
        number = int(text) if text else default
    except ValueError:
        raise BadQuery(f"{name}: {text[:40]!r} is not a whole number") from None
    if abs(number) > MOST_WHOLE:
        raise BadQuery(f"{name}: {text[:40]!r} is too large a number")
    return number


def _real(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    try:
        number = float(text) if text else None
    except ValueError:
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise BadQuery(f"{name}: {text[:40]!r} is not a number of seconds")
    return number


def _required(request: Request, name: str) -> str:
    text = request.query_params.get(name, "")
    if not text:
        raise BadQuery(f"{name} is missing: give a run's id, and the name of one of its evaluations")
    return text


# ---- JSON ----


_ADAPTERS: dict[type, TypeAdapter[object]] = {}
"""Made once for each kind of record, because that takes milliseconds."""


_ROWS: Mapping[type, TypeAdapter[object]] = {
    kind: TypeAdapter(list[kind])  # type: ignore[valid-type]
    for kind in (r.RunRow, r.TaskRow, r.Side)
}


def encode(record: object) -> bytes:
    """A record, or a list of them, as JSON; numbers that are not finite become null. Raises ValueError where a field
    has another type than its page expects."""
    if isinstance(record, list):
        return _ROWS[type(record[0])].dump_json(record, warnings="error") if record else b"[]"
    kind = type(record)
    return _ADAPTERS.setdefault(kind, _ADAPTERS.get(kind) or TypeAdapter(kind)).dump_json(record, warnings="error")


async def _answer(record: object) -> Response:
    data = await asyncio.to_thread(encode, record)
    return Response(data, media_type="application/json", headers={"cache-control": "no-store"})


# ---- pages ----


async def _no_such_route(request: Request) -> Response:
    return JSONResponse({"error": f"/api/{request.path_params['rest'][:200]} is not known"}, status_code=404)


async def _asset(request: Request) -> Response:
    """Names of assets hold a hash of what is in them."""
    name = request.path_params["name"]
    file = STATIC / "assets" / name
    if name != Path(name).name or not file.is_file():
        return JSONResponse({"error": f"asset {name[:100]!r} is not known"}, status_code=404)
    return FileResponse(file, headers={"cache-control": FOR_EVER})


async def _index(_: Request) -> Response:
    """Every other path is a page, which the front end draws."""
    file = STATIC / "index.html"
    if not file.is_file():
        return JSONResponse({"error": f"{file} is missing: build the pages with `make web`"}, status_code=500)
    data = await asyncio.to_thread(file.read_bytes)
    tag = hashlib.sha256(data).hexdigest()[:16]
    return Response(data, media_type="text/html", headers={"cache-control": "no-cache", "etag": f'"{tag}"'})
