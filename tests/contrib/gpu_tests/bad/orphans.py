"""Processes that leave their parent, its session and its process group."""

from __future__ import annotations

import os
import signal
import time

from agentrl.contrib.gpu_tests.cards import hold


def orphan(mib: int, card: int) -> int:
    """Start one by a double fork; it holds memory of a simulated card, ignores SIGTERM, and never ends. Its process id."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with hold(mib, card):
                os.write(write, str(os.getpid()).encode())
                while True:
                    time.sleep(1000)
        os._exit(0)
    os.waitpid(child, 0)
    pid = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    return pid
