"""Whether machines can be reached, for `dart doctor`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from dart.workers.env.osworld.options import OSWorldOptions

SECONDS = 10.0


def unreachable(options: OSWorldOptions) -> str | None:
    """Which hosts give no screenshot, or that the emulator server does not answer; None if all is well, or if the hosts
    are reverted before an episode and some answer."""
    if options.pool == "emulator":
        url = f"{options.emulator.url.rstrip('/')}/tokens"
        if why := _problem(url):
            return f"environment.options.emulator.url: {url} {why}: start the server, or correct the address"
        return None
    urls = [f"http://{host.host}:{host.server}/screenshot" for host in options.static.hosts]
    with ThreadPoolExecutor(16) as pool:
        wrong = [f"{url} {why}" for url, why in zip(urls, pool.map(_problem, urls), strict=True) if why]
    if not wrong or (options.static.renew != "none" and len(wrong) < len(urls)):
        return None  # one that an episode has switched off is reverted before it has to answer
    return f"environment.options.static.hosts: {'; '.join(wrong)}: start OSWorld's server there, or leave the host out"


def _problem(url: str) -> str:
    import httpx

    try:
        answer = httpx.get(url, timeout=SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return f"does not answer ({type(error).__name__})"
    return "" if answer.status_code == 200 else f"answers {answer.status_code}"
