"""Which addresses are loopback: traffic to them never leaves this machine."""

from __future__ import annotations

import ipaddress
from collections.abc import MutableMapping


def is_loopback(host: str) -> bool:
    """True for localhost, 127.0.0.0/8 and ::1, in brackets or not. Other names are not looked up: they may change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def without_proxy(environment: MutableMapping[str, str]) -> None:
    """Where variables name a proxy, except the loopback from it for this process's libraries and its children.

    The exceptions end up under both names: some libraries read no_proxy alone, others NO_PROXY.
    """
    if not any(name.lower().endswith("_proxy") for name in environment):
        return
    told = [part.strip() for name in ("no_proxy", "NO_PROXY") for part in environment.get(name, "").split(",")]
    if "*" not in told:  # everything, but only where it stands alone
        told = [*dict.fromkeys(part for part in (*told, "localhost", "127.0.0.1", "::1") if part)]
        environment["no_proxy"] = environment["NO_PROXY"] = ",".join(told)
