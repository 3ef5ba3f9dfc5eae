"""Who may ask the dashboard, and what a browser may do with its answers.

On loopback no token is needed, but the Host header must name this machine, so that a page of another site cannot reach
it under a name of its own (DNS rebinding). Elsewhere every request needs the dashboard's token: from the address that
was printed (?token=), which becomes a cookie, or as "Authorization: Bearer". Requests that change something must come
from a page of the dashboard itself.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dart.core.loopback import is_loopback

COOKIE = "dart_view"
SAFE_METHODS = frozenset({"GET", "HEAD"})
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Access:
    """An ASGI layer in front of the dashboard. `token` None: only loopback may ask."""

    app: ASGIApp
    token: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self._answer(scope)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (refused or self.app)(scope, receive, with_headers)

    def _answer(self, scope: Scope) -> Response | None:
        """The answer to a request that is not let through; None for one that is."""
        headers = Headers(scope=scope)
        if self.token is None:
            host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
            if not is_loopback(host):
                return _refuse(403, f"host {host[:100]!r} is not this machine: open http://127.0.0.1, with the port")
        else:
            query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
            if "token" in query:
                return self._log_in(scope, query)
            if not self._known(headers):
                return _refuse(401, "this dashboard needs its token: open the address that `dart view` printed")
        if scope["method"] not in SAFE_METHODS and not _same_origin(headers):
            return _refuse(403, "requests that change something must come from one of the dashboard's own pages")
        return None

    def _log_in(self, scope: Scope, query: dict[str, str]) -> Response:
        if not self._matches(query.pop("token")):
            return _refuse(401, "that is not this dashboard's token: open the address that `dart view` printed")
        assert self.token is not None
        rest = f"?{urlencode(query)}" if query else ""
        # As it was asked for: a name within the path may hold "#", "?", "%" or "/" of its own.
        path = (scope.get("raw_path") or quote(scope["path"]).encode()).decode("latin-1")
        answer = RedirectResponse(f"/{path.lstrip('/')}{rest}", status_code=303)
        secure = scope.get("scheme") == "https"
        name = _cookie(Headers(scope=scope))
        answer.set_cookie(name, self.token, httponly=True, samesite="strict", secure=secure, path="/")
        return answer

    def _known(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._matches(given)
        return self._matches(cookie_parser(headers.get("cookie", "")).get(_cookie(headers), ""))

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.token or "").encode())


def _cookie(headers: Headers) -> str:
    """Its name, with the port: a browser keeps cookies by host alone, and each run's dashboard has another port."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isdecimal() else COOKIE


def _same_origin(headers: Headers) -> bool:
    """Whether a browser says that the request is from a page of this server; a program sends neither header."""
    site = headers.get("sec-fetch-site")
    if site is not None and site != "same-origin":
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host", "")


def _refuse(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=status)
