"""Hostile clients of the endpoint that Prometheus scrapes: refused by name (tests/contrib/agents has those that do not go on)."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import httpx
import pytest

from agentrl.config.schema import PrometheusConfig
from agentrl.contrib.trackers.prometheus import MetricsEndpoint

pytest.importorskip("prometheus_client", reason="needs agentrl[prometheus]")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint(PrometheusConfig(port=0))
    endpoint.row("train", 1, {"scored": 3})
    yield endpoint
    endpoint.close()
    assert not endpoint._server._thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(endpoint.url, trust_env=False)


HOST = b"Host: 127.0.0.1\r\n"
END = b"Connection: close\r\n\r\n"
TWO_HOSTS = (403, b"one Host") if find_spec("httptools") else (400, b"Invalid HTTP request")


@pytest.mark.parametrize(("request_", "status", "said"), [
    (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n" + END, 403, b"its own address only (Host)"),
    # uvicorn's parser refuses two of them itself if httptools is not there.
    (b"GET /metrics HTTP/1.1\r\n" + HOST + b"Host: localhost\r\n" + END, *TWO_HOSTS),
    (b"GET /metrics HTTP/1.1\r\n" + HOST + b"Origin: http://evil.example\r\n" + END, 403, b"pages of other sites"),
    (b"GET /metrics HTTP/1.1\r\n" + HOST + b"Sec-Fetch-Site: cross-site\r\n" + END, 403, b"pages of other sites"),
    (b"POST /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: 1000000000\r\n" + END, 413, b"more than 1024 bytes"),
    (b"POST /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n" + END, 405, b"only GET and HEAD"),
    (b"GET /../../etc/passwd HTTP/1.1\r\n" + HOST + END, 404, b"/metrics"),
    (b"GET /metrics?name[]=%00 HTTP/1.1\r\n" + HOST + END, 200, b"agentrl_episodes_total"),
    (b"GET /metrics HTTP/1.1\r\n" + HOST + b"Accept: \xff\xfe;q=1e999,,;\r\n" + END, 200, b"agentrl_episodes_total"),
    (b"HEAD /metrics HTTP/1.1\r\n" + HOST + END, 200, b""),
], ids=range(10))  # fmt: skip
def test_a_request_is_answered_or_refused_by_name(endpoint: MetricsEndpoint, request_: bytes, status: int, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(endpoint.url).port), timeout=10.0) as link:
        link.sendall(request_)
        found = b""
        while part := link.recv(65_536):
            found += part
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and said in body, (head, body[:300])
    assert request_[:4] != b"HEAD" or (body == b"" and b"content-length: 0" not in head)


def test_an_openmetrics_scrape_gets_what_it_asks_for(endpoint: MetricsEndpoint) -> None:
    found = httpx.get(endpoint.url, headers={"accept": "application/openmetrics-text; version=1.0.0"}, trust_env=False)
    assert found.headers["content-type"].startswith("application/openmetrics-text") and found.text.endswith("# EOF\n")


async def test_a_slow_scrape_holds_up_no_event_loop(endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()
    monkeypatch.setattr(endpoint, "collect", lambda: [slow.wait(20)][:0])
    async with httpx.AsyncClient(trust_env=False) as client:
        scrape = asyncio.create_task(client.get(endpoint.url, timeout=30))
        await asyncio.sleep(0.2)
        refused = await client.get(endpoint.url, headers={"host": "evil.example"})
        assert refused.status_code == 403 and not scrape.done()
        slow.set()
        assert (await scrape).status_code == 200
