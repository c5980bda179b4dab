"""A proxy in the environment: what listens on this machine is asked directly, and errors name the proxy."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from agentrl.config.schema import AgentConfig
from agentrl.contrib.agents.endpoint import Endpoint
from agentrl.contrib.agents.programs import program_of
from agentrl.contrib.users import ModelUser
from agentrl.env.users import UserModel
from agentrl.render.litellm_calls import load_litellm
from agentrl.utils import network as proxies
from agentrl.utils.errors import AgentFaultError, EnvError
from tests.rollout.loopback import LoopbackServer

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
MESSAGE = {"role": "assistant", "content": "hello"}
ANSWER = {"choices": [{"index": 0, "finish_reason": "stop", "message": MESSAGE}], "answer": "hello"}


class Stub(LoopbackServer):
    """Answers as a model, or refuses as a proxy, and keeps what it was asked."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.refuses, self.seen, self.url = refuses, list[str](), self.url.removesuffix("/v1")
        handler: Any = self.http.RequestHandlerClass
        handler.do_GET = handler.do_CONNECT = handler.do_POST

    def handle(self, handler: Any) -> None:
        handler.rfile.read(int(handler.headers.get("content-length") or 0))
        self.seen.append(handler.path)
        self.send(handler, "no such host" if self.refuses else json.dumps(ANSWER), 503 if self.refuses else 200)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with Stub(refuses=True) as stub:
        monkeypatch.setenv("HTTP_PROXY", stub.url.replace("//", "//me:secret@"))
        monkeypatch.setenv("NO_PROXY", "internal.example")
        monkeypatch.setenv("no_proxy", "")
        yield stub


def post(url: str) -> tuple[str | None, str | None]:
    """What an agent behind a URL answers, and how it failed."""
    program = program_of(AgentConfig(url=url))
    episode: Any = SimpleNamespace(to_json=lambda: {}, api_key="key")

    async def run() -> Any:
        try:
            return await program.run(episode, {})
        finally:
            await program.close()

    try:
        outcome = asyncio.run(run())
    except AgentFaultError as fault:
        return None, str(fault)
    return outcome.output, outcome.failure


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "127.0.1.1"])
def test_an_agent_on_this_machine_is_asked_directly(proxy: Stub, name: str) -> None:
    with Stub(refuses=False) as seen:
        output, failure = post(seen.url.replace("127.0.0.1", name))
    if name == "127.0.1.1":  # it listens on 127.0.0.1 alone: a direct connection is refused, and the proxy is not asked
        assert failure is not None and "ConnectError" in failure
    else:
        assert (output, failure) == ("hello", None)
    assert proxy.seen == []


def test_an_api_a_judge_and_a_user_on_this_machine_are_asked_directly(proxy: Stub) -> None:
    pytest.importorskip("litellm")
    with Stub(refuses=False) as server:
        request = UserModel("openai/m", {"api_base": server.url, "api_key": "k"}).request([{"role": "user", "content": "hi"}])
        answer = load_litellm().completion(**request)
    assert answer.choices[0].message.content == "hello"
    assert (proxy.seen, len(server.seen)) == ([], 1)


def test_the_endpoint_is_asked_directly_by_an_agent_in_this_process(proxy: Stub) -> None:
    async def run() -> int:
        endpoint = Endpoint(None, None)  # type: ignore[arg-type]
        async with endpoint, httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{endpoint._port}/nothing")).status_code

    assert asyncio.run(run()) != 503
    assert proxy.seen == []


def test_an_error_names_the_proxy_and_the_way_around_it_but_no_password(proxy: Stub) -> None:
    output, failure = post("http://model.example:8000")
    assert output is None and failure is not None
    assert f"the proxy {proxy.url} of HTTP_PROXY; NO_PROXY=model.example" in failure
    assert "secret" not in failure
    proxies.exempt()
    assert proxies.through_proxy("http://internal.example/v1") == proxies.through_proxy("http://127.0.0.1:9") == ""


def test_errors_of_a_model_behind_an_api_name_the_proxy(proxy: Stub) -> None:
    pytest.importorskip("litellm")
    user = ModelUser(model="openai/m", api_base="http://model.example/v1", api_key="k", num_retries=0, max_retries=0)
    with pytest.raises(EnvError, match=r"the proxy http://127\.0\.0\.1:\d+ of HTTP_PROXY; NO_PROXY=model.example"):
        asyncio.run(user._complete([{"role": "user", "content": "hi"}]))


def test_what_the_user_has_exempt_stays_and_nothing_is_set_without_a_proxy(proxy: Stub) -> None:
    proxies.exempt("10.1.2.3")
    proxies.exempt("10.1.2.3")
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "internal.example,127.0.0.1,localhost,::1,10.1.2.3"
    env = {"PATH": "/bin"}
    proxies.exempt("10.1.2.3", environ=env)
    assert env == {"PATH": "/bin"}


@pytest.mark.parametrize("name", ["https_proxy", "ALL_PROXY"])
def test_every_command_exempts_this_machine_for_all_that_it_starts(name: str) -> None:
    env = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    env[name] = "http://proxy:3128"
    program = (
        "import atexit, os; from agentrl.cli.main import main; atexit.register(lambda: print(os.environ['NO_PROXY'])); main()"
    )
    ran = subprocess.run([sys.executable, "-c", program, "--version"], env=env, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == "127.0.0.1,localhost,::1"
