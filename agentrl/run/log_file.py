"""The log of a run, `log.txt`: begun anew at a size, with so many older ones kept beside it."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from agentrl.config.schema import KeepConfig
from agentrl.files import plain_file
from agentrl.redaction import redact_said
from agentrl.shown import safe


class SafeLines(logging.Formatter):
    """Without secrets, and with what a terminal could act on written out, whichever program the run is part of."""

    def format(self, record: logging.LogRecord) -> str:
        return safe(redact_said(super().format(record)))


class LogFile(RotatingFileHandler):
    """Writes lines with time, level and name. Raises OSError if there is something else than a plain file: a pipe in its place
    would be waited for."""

    def __init__(self, path: Path, keep: KeepConfig) -> None:
        super().__init__(path, maxBytes=max(int(keep.log_mib * 2**20), 1), backupCount=keep.log_files, encoding="utf-8")
        self.setFormatter(SafeLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        """On a full disk lines wait in the buffer. That the disk is full is said by what the run cannot do without; a traceback a
        line on the terminal would hide it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Also on a full disk; what still waits is lost then."""
        with suppress(OSError):
            super().close()

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=plain_file)
