"""What the variables that name a proxy change, and what they don't."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from dart.core.loopback import without_proxy
from dart.wire.channel import Dial
from dart.workers.env.browser import Browser

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
NOBODY = "http://127.0.0.1:9"
PAGE = b"<title>here</title>"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(PAGE)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_coordinator_on_this_machine_is_dialled_without_a_proxy(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.setenv(name, NOBODY)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(60), Dial(f"{host}:{port}").channel() as dialled:
        await dialled.channel_ready()
    await server.stop(None)


async def test_a_coordinator_elsewhere_is_dialled_through_the_proxy_that_is_meant_for_grpc_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: asyncio.Queue[bytes] = asyncio.Queue()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.put_nowait(await reader.readline())
        writer.close()

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, asyncio.timeout(60):
        monkeypatch.setenv("http_proxy", address)
        async with Dial("192.0.2.1:7").channel() as direct:  # an address that no machine has
            direct.get_state(try_to_connect=True)
            monkeypatch.setenv("grpc_proxy", address)
            async with Dial("192.0.2.1:8").channel() as proxied:
                proxied.get_state(try_to_connect=True)
                assert (await asked.get()).startswith(b"CONNECT 192.0.2.1:8 ")
    assert asked.empty()


def test_exceptions_from_the_proxy_include_the_loopback_under_both_names() -> None:
    environment = {"https_proxy": NOBODY, "NO_PROXY": "a.example, 127.0.0.1"}
    without_proxy(environment)
    assert environment["no_proxy"] == environment["NO_PROXY"] == "a.example,127.0.0.1,localhost,::1"
    for untouched in ({"PATH": "/bin"}, {"http_proxy": NOBODY, "no_proxy": "*"}):
        before = dict(untouched)
        without_proxy(untouched)
        assert untouched == before


@pytest.mark.browser
async def test_chromium_asks_a_server_on_this_machine_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.setenv(name, NOBODY)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(ANSWER + PAGE)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, Browser.launch() as browser:
        page = await browser.new_page((160, 210), 60.0)
        await page.navigate(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        assert await page.evaluate("document.title") == "here"
