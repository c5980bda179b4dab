"""Secrets: references to environment variables in configs, and redaction of everything that leaves a process.

A config says `env:NAME`, or `${env:NAME}` within a text; `resolve_references` replaces it by the variable's value as late as
possible, and that value is a secret from then on. So are values of environment variables and config keys with telling names
(API_KEY, token, password, ...), passwords in URLs, and values of such flags in commands.

`redact` replaces every known secret; `redact_said`, for messages, logs and errors, also text that looks like one (bearer tokens,
keys of well-known providers). Text that a policy sees or writes is only changed where it contains a known secret."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from agentrl.utils.errors import ConfigError, OutputError
from agentrl.utils.terminal import safe
from agentrl.utils.threads import fork_safe

SHORTEST = 8
"""Minimum characters of a secret recognized by its name: shorter values occur in too much ordinary text."""
REDACTED = "[redacted]"
_WHOLE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_WITHIN = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_NAMES = {"key", "apikey", "token", "secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "auth",
          "authorization", "bearer", "cookie", "pat"}  # fmt: skip
_NOT_ITSELF = {"env", "path", "file", "dir", "folder", "name", "id", "url", "type", "max", "min", "mode", "sock"}
"""Last words of names whose value is not the secret itself: `token_env`, `SSH_AUTH_SOCK`."""
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^\s\"'<>]+", re.IGNORECASE)
_LOOKS = re.compile(
    r"(?<![A-Za-z0-9])(?:sk|rk|pk)-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}|"
    r"xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{35}|agentrl-[A-Za-z0-9_-]{40,}|"
    r"(?i:(?<=bearer )[A-Za-z0-9._~+/=-]{8,})|(?i:(?<=://)[^\s/@:]*:[^\s/@]+(?=@))"
)
_known: set[str] = set()
_ordered: list[str] = []
_read: list[bool] = []
_lock = fork_safe(threading.Lock())


def resolve_references(value: Any, where: str) -> Any:
    """Replace references in all texts of a value; returns the same object if it has none. `where`: its config key. Raises
    ConfigError for an unset variable."""
    if next(references(value, where), None) is None:
        return value
    if isinstance(value, str):
        if whole := _WHOLE.fullmatch(value):
            return _variable(whole.group(1), where)
        return _WITHIN.sub(lambda found: _variable(found.group(1), where), value)
    if isinstance(value, Mapping):
        return {key: resolve_references(inner, f"{where}.{key}") for key, inner in value.items()}
    return [resolve_references(inner, where) for inner in value]


def references(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts with references to environment variables: (key below `where`, text)."""
    for key, text in texts(value, where):
        if _WHOLE.fullmatch(text) or _WITHIN.search(text):
            yield key, text


def texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield all texts of a value: (key below `where`, text)."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner, where)


def map_texts(value: Any, change: Callable[[str], str], keys: bool = True) -> Any:
    """Apply `change` to all texts of a JSON value, and to its keys if `keys`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        named = change if keys else str
        return {named(key) if isinstance(key, str) else key: map_texts(item, change, keys) for key, item in value.items()}
    return [map_texts(item, change, keys) for item in value] if isinstance(value, list | tuple) else value


def _variable(name: str, where: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"{where}: the environment variable {name} is not set")
    remember(value)
    return value


def remember(*secrets: str) -> None:
    """Redact these from now on, also as escaped in JSON and URLs."""
    with _lock:
        for secret in secrets:
            if len(secret) >= 4:
                _known.update(
                    {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret, safe="")}
                )
        _ordered[:] = sorted(_known, key=len, reverse=True)


def learn(value: Any, name: str = "") -> None:
    """Remember the plain-text secrets of a config or command, found by names, flags and URLs."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            learn(inner, str(key))
    elif isinstance(value, list | tuple):
        words = [word if isinstance(word, str) else "" for word in value]
        for before, word in zip(["", *words], words, strict=False):
            learn(word, before.lstrip("-") if before.startswith("-") and "=" not in before else name)
        for inner in value:
            if not isinstance(inner, str):
                learn(inner, name)
    if not isinstance(value, str) or not value or _WHOLE.fullmatch(value):
        return
    if _names_secret(name) and len(value) >= SHORTEST and not _WITHIN.search(value) and not value.startswith(("/", "./")):
        remember(value)
    for address in _ADDRESS.findall(value):
        try:
            parts = urlsplit(address)
            if parts.password:
                remember(parts.password, unquote(parts.password), basic(address))
            remember(*(said for key, said in parse_qsl(parts.query) if _names_secret(key) and len(said) >= SHORTEST))
        except ValueError:
            continue
    flag, equal, rest = value.lstrip("-").partition("=")
    if not equal:
        flag, equal, rest = value.partition(": ")  # a header
    if equal and flag != value and " " not in flag and _names_secret(flag) and len(rest) >= SHORTEST and not _WITHIN.search(rest):
        remember(rest.removeprefix("Bearer "))


def basic(address: str) -> str:
    """Encode the name and password of a URL as in a request header (RFC 7617)."""
    parts = urlsplit(address)
    return b64encode(f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()).decode()


def _names_secret(name: str) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]
    return bool(words) and words[-1] not in _NOT_ITSELF and not _NAMES.isdisjoint(words)


def known() -> list[str]:
    """Return all secrets of this process, longest first, as one may contain another."""
    if not _read:
        _read.append(True)
        for name, value in os.environ.items():
            learn(value, name)
    return _ordered


def redact(text: str) -> str:
    """Replace known secrets in a text."""
    for secret in known():
        if secret in text:
            text = text.replace(secret, REDACTED)
    return text


def redact_said(text: str) -> str:
    """Replace known secrets and text that looks like one, for messages, logs and errors."""
    return _LOOKS.sub(REDACTED, redact(text))


def redact_json(value: Any, *, said: bool = False) -> Any:
    """Redact all texts and keys of a JSON value."""
    return map_texts(value, redact_said if said else redact)


# -- outputs of a process --------------------------------------------------------------------------


def guard_logs() -> None:
    """Redact every log record of this process, including tracebacks, and escape control characters; idempotent."""
    before = logging.getLogRecordFactory()
    if getattr(before, "redacts", False):
        return

    def make_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        try:
            record.msg, record.args = safe(redact_said(record.getMessage())), ()
        except Exception:  # the message does not fit its arguments; logging reports it
            return record
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = safe(redact_said(logging.Formatter().formatException(record.exc_info)))
        return record

    make_record.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_record)


class _Stream:
    """A text stream that redacts its output."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        with self._writable():
            self._inner.write(redact_said(text))
        return len(text)

    def flush(self) -> None:
        with self._writable():
            self._inner.flush()

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Discard output after a terminal has gone (EIO), so that work continues. Raises OutputError for other failures: callers
        that write a run folder would take a plain OSError for a full disk there."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._inner.fileno())  # also for output of Python's own exit
            if error.errno != errno.EIO:
                name = {1: "standard output", 2: "standard error"}.get(self._inner.fileno(), "the output")
                raise OutputError(f"{name}: cannot be written: {error.strerror}. Send it elsewhere") from None

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def guard_process(config: Any = None) -> None:
    """Redact everything that this process logs and prints from now on; for processes whose output is logged, such as Ray actors.
    `config`: may hold secrets in plain text."""
    learn(config)
    guard_logs()
    if not isinstance(sys.stdout, _Stream):
        sys.stdout, sys.stderr = (cast(Any, _Stream(stream)) for stream in (sys.stdout, sys.stderr))


@contextmanager
def guarded_output() -> Iterator[None]:
    """Redact logs and prints inside the context."""
    guard_logs()
    # Open descriptors that a shell has closed (`>&-`): else the next opened file would receive output of programs.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(Any, _Stream(stream)) for stream in before)
    try:
        yield
    finally:
        if isinstance(sys.stdout, _Stream) and isinstance(sys.stderr, _Stream):
            sys.stdout, sys.stderr = before
