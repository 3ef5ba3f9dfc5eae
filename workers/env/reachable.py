"""Whether the servers that worlds use can be reached, for `dart doctor`. Needs httpx."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

SECONDS = 10.0
AT_ONCE = 16


def silent(urls: Sequence[str]) -> list[str]:
    """The URLs that do not answer a GET with a status of 2xx within SECONDS, each with what happened instead."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [f"{url} {why}" for url, why in zip(urls, pool.map(_asked, urls), strict=True) if why]


def _asked(url: str) -> str:
    """Why it counts as silent; empty if it does not."""
    import httpx

    try:
        answer = httpx.get(url, timeout=SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return f"does not answer ({type(error).__name__})"
    return "" if answer.is_success else f"answers {answer.status_code}"
