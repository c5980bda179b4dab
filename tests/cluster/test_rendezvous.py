"""Where the store of torch.distributed listens: who reaches it can read and write it."""

from __future__ import annotations

import logging
import socket

import pytest

from agentrl.cluster.machine import _listeners, open_rendezvous


@pytest.mark.parametrize(("host", "bound", "warned"), [("127.0.0.1", "127.0.0.1", False), ("192.0.2.1", "0.0.0.0", True)])
def test_it_listens_at_the_announced_address_alone_if_that_is_its_own(
    host: str, bound: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        place = open_rendezvous(host)
    with socket.socket(fileno=_listeners.pop(place).detach()) as found:
        assert found.getsockname() == (bound, place.port) and place.host == host
    assert any("listens on all interfaces" in row.message for row in caplog.records) is warned
