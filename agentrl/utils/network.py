"""Parse untrusted JSON, classify addresses, and configure proxies."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from agentrl.utils.parsing import no_twice, refuse_constant

CONTAINERS = 300_000
"""Maximum lists and objects in one body: a body of nothing else takes 20 times its bytes in memory, and seconds to parse."""
DEPTH = 64
"""Maximum nesting of lists and objects."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def strict_json(data: bytes | bytearray | str, containers: int = CONTAINERS, depth: int = DEPTH, *, rfc: bool = True) -> Any:
    """Parse JSON strictly. Raises ValueError also for numbers of more than 4,300 digits, duplicate keys, more than `containers`
    lists and objects, and nesting deeper than `depth`; and, if `rfc`, for NaN and infinities, which Python's own writer adds to
    JSON."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
    if raw.count(b"{") + raw.count(b"[") > containers:
        raise ValueError(f"more than {containers} lists and objects")
    try:
        text = raw.decode("utf-8")
        finite: dict[str, Any] = {"parse_constant": refuse_constant, "parse_float": _finite} if rfc else {}
        found = json.loads(text, object_pairs_hook=no_twice, **finite)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError(f"lists and objects in more than {depth} of each other") from None
    # Level by level instead of recursively, which could overflow the stack.
    level = [found]
    for _ in range(depth + 1):
        inside = (one.values() if isinstance(one, dict) else one if isinstance(one, list) else () for one in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if not level:
            return found
    raise ValueError(f"lists and objects in more than {depth} of each other")


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text[:40]} is larger than a number can be")
    return value


def is_loopback(host: str) -> bool:
    """Return True if an address or name reaches only this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


# Proxies


def exempt(*hosts: str, environ: MutableMapping[str, str] | None = None) -> None:
    """Add this machine and `hosts` to NO_PROXY, if there is a proxy: it could not reach servers that listen here."""
    env = os.environ if environ is None else environ
    if not any(value for name, value in env.items() if name.lower().endswith("_proxy") and name.lower() != "no_proxy"):
        return
    given = ",".join(env.get(name, "") for name in ("no_proxy", "NO_PROXY")).split(",")
    wanted = dict.fromkeys([*(one.strip() for one in given if one.strip()), *LOOPBACK, *filter(None, hosts)])
    # Programs differ in the variable that they read first.
    env["no_proxy"] = env["NO_PROXY"] = ",".join(wanted)


def exempt_own(url: str) -> None:
    """Add the host of `url` to NO_PROXY if it is this machine, under any of its names."""
    host = urlsplit(url).hostname or ""
    if is_loopback(host):
        exempt(host)


def through_proxy(url: str | None) -> str:
    """Format the proxy used for a URL (default: HTTPS) as part of an error; "" without a proxy."""
    parts = urlsplit(url or "https://")
    proxies = getproxies_environment()
    kind = parts.scheme if parts.scheme in proxies else "all"
    if kind not in proxies or (parts.hostname and proxy_bypass(parts.hostname)):
        return ""
    proxy = urlsplit(proxies[kind] if "//" in proxies[kind] else f"//{proxies[kind]}")
    where = f"{proxy.scheme or 'http'}://{proxy.netloc.rpartition('@')[2]}"  # without the password
    host = parts.hostname or "HOST"
    return f" (asked through the proxy {where} of {kind.upper()}_PROXY; NO_PROXY={host} would ask it directly)"
