"""Proxies of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY): what stays clear of them, and errors that name them."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from agentrl.serving import LOOPBACK, is_loopback


def exempt(*hosts: str, environ: MutableMapping[str, str] | None = None) -> None:
    """Add this machine, and `hosts`, to NO_PROXY: a proxy elsewhere cannot reach what listens here. Without a proxy, nothing."""
    env = os.environ if environ is None else environ
    if not any(value for name, value in env.items() if name.lower().endswith("_proxy") and name.lower() != "no_proxy"):
        return
    given = ",".join(env.get(name, "") for name in ("no_proxy", "NO_PROXY")).split(",")
    wanted = dict.fromkeys([*(one.strip() for one in given if one.strip()), *LOOPBACK, *filter(None, hosts)])
    # Both, since programs differ in which of them they read first.
    env["no_proxy"] = env["NO_PROXY"] = ",".join(wanted)


def exempt_own(url: str) -> None:
    """`exempt`, if the address is of this machine alone, by whichever of its names."""
    host = urlsplit(url).hostname or ""
    if is_loopback(host):
        exempt(host)


def through_proxy(url: str | None) -> str:
    """What an error says of the proxy through which an address is asked; "" if there is none. Without an address: HTTPS."""
    parts = urlsplit(url or "https://")
    proxies = getproxies_environment()
    kind = parts.scheme if parts.scheme in proxies else "all"
    if kind not in proxies or (parts.hostname and proxy_bypass(parts.hostname)):
        return ""
    proxy = urlsplit(proxies[kind] if "//" in proxies[kind] else f"//{proxies[kind]}")
    where = f"{proxy.scheme or 'http'}://{proxy.netloc.rpartition('@')[2]}"  # without its password
    host = parts.hostname or "HOST"
    return f" (asked through the proxy {where} of {kind.upper()}_PROXY; NO_PROXY={host} would ask it directly)"
