"""Whether a running cluster can be joined: found out before Ray tries, which takes a minute of log lines to say no."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys

from agentrl.errors import ResourceError

log = logging.getLogger(__name__)

REACH_S = 5.0
"""For a plain connection to the head."""
CLIENT = "ray://"
ANSWER_S = 20.0
"""For the head's answer, with the time to import Ray."""
PROBE = """
import sys
try:
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import GcsClient
except ImportError:
    sys.exit(0)  # another Ray: it is asked when it joins
ensure_token_if_auth_enabled(None, create_token_if_missing=False)
GcsClient(address=sys.argv[1])
"""
"""Asks the head for the cluster's id, as a joining driver does. In a process of its own, because a missing token ends the
process, and because Ray writes its log lines past Python."""


def check_join(address: str, key: str = "cluster.address") -> None:
    """Raise ResourceError if the cluster at `address` (host:port) cannot be reached, or does not take this process's token.

    `key`: what named it, cluster.address or RAY_ADDRESS. "auto" is the cluster that this machine belongs to; a Ray
    client's server ("ray://host:port") must only answer.
    """
    if address == "auto":
        address = _here()
    elsewhere = " (of the environment; unset it to run on this machine alone)" if key == "RAY_ADDRESS" else ""
    given = f"{key} = {address!r}{elsewhere}"
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not host or not port.isdigit():
        if address in ("auto", "local"):
            return
        raise ResourceError(f'{given}: expected the head as "HOST:PORT" (6379 unless it was set), or "auto"')
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as problem:
        raise ResourceError(
            f"{given}: nothing answers there ({problem}). On the head: ray start --head --port={port}; its "
            "address must be one that this machine reaches, and no firewall may be in between"
        ) from None
    if address.startswith(CLIENT):
        return
    try:
        asked = subprocess.run([sys.executable, "-c", PROBE, address], capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"{given}: something listens there, but it did not answer as a Ray head within {ANSWER_S:g} s"
        ) from None
    if asked.returncode == 0:
        return
    if "AuthenticationError" in asked.stderr:
        raise ResourceError(_refused(given))
    # Not refused by name: Ray itself will say what is wrong, or that all is well.
    log.warning("asking the head at %s whether it can be joined failed: %s", address, asked.stderr.strip()[-500:])


def _here() -> str:
    """The address that Ray takes "auto" for: RAY_ADDRESS, or the cluster whose processes run on this machine."""
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:
        return "auto"  # another Ray: it is asked when it joins
    try:
        return str(canonicalize_bootstrap_address("auto"))
    except ConnectionError:
        raise ResourceError(
            "cluster.address = 'auto': no Ray runs on this machine. Start one here (ray start --head, or ray start "
            '--address=HEAD:6379), give the head\'s address, or set cluster.address = "" for this machine alone; a run for '
            "another machine is planned with --dry-run --gpu-memory GIB --nodes 4x8"
        ) from None


def _refused(key: str) -> str:
    mode = os.environ.get("RAY_AUTH_MODE")
    given = next((f"{key} is set" for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(key)), "")
    return (
        f"{key}: the cluster asks for a token, and it does not take this process's: RAY_AUTH_MODE is "
        f"{mode or 'not set'}, {given or 'the token would come from ~/.ray/auth_token'}. Set RAY_AUTH_MODE=token, and give the "
        "head's token (there: ray get-auth-token) as RAY_AUTH_TOKEN, as a file named by RAY_AUTH_TOKEN_PATH, or in "
        "~/.ray/auth_token"
    )
