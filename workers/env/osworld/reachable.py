"""Whether machines can be reached, for `dart doctor`."""

from __future__ import annotations

from dart.errors import UserError
from dart.wire.channel import read_token
from dart.workers.env.osworld.options import EmulatorPool, OSWorldOptions
from dart.workers.env.reachable import SECONDS, silent


def _unknown(url: str, emulator: EmulatorPool) -> str | None:
    """The first token that is not there, or that the server does not know. No message shows a token."""
    import httpx
    from pydantic import ValidationError

    from dart.workers.env.osworld.emulators import known_tokens, unknown

    try:
        tokens = {source: read_token(source, "environment.options.emulator.tokens") for source in emulator.tokens}
    except UserError as error:
        return str(error)
    try:
        known = known_tokens(httpx.get(url, timeout=SECONDS, trust_env=False))
    except (httpx.HTTPError, ValidationError):  # a server that does not tell them
        return None
    wrong = [source for source, token in tokens.items() if known and token not in known]
    return unknown(url.removesuffix("/tokens"), f"the token of {wrong[0]}") if wrong else None


def unreachable(options: OSWorldOptions) -> str | None:
    """Which hosts give no screenshot, or that the emulator server does not answer; None if all is well, or if the hosts
    are reverted before an episode and some answer."""
    if options.pool == "emulator":
        url = f"{options.emulator.url.rstrip('/')}/tokens"
        for why in silent([url]):
            return f"environment.options.emulator.url: {why}: start the server, or correct the address"
        return _unknown(url, options.emulator)
    urls = [f"http://{host.host}:{host.server}/screenshot" for host in options.static.hosts]
    wrong = silent(urls)
    if not wrong or (options.static.renew != "none" and len(wrong) < len(urls)):
        return None  # one that an episode has switched off is reverted before it has to answer
    return f"environment.options.static.hosts: {'; '.join(wrong)}: start OSWorld's server there, or leave the host out"
