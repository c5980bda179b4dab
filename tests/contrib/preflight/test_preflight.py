"""MCP servers are started once before a run, and keys are there. (Models behind an API: test_api_eval.py.)"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.utils.errors import ConfigError
from tests.contrib.preflight.preflighted import preflight
from tests.run.own_spec import with_spec

DIES = [sys.executable, "-c", "import sys; sys.exit('no licence file at /etc/licence')"]


def test_a_dead_server_is_refused_with_what_it_wrote_in_a_dry_run_too(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = json.dumps(DIES)
    assert main(["train", "quickstart", "engine=embedded", "--dry-run", f"tools.mcp.shop.command={command}"]) == 2
    said = capfd.readouterr().err
    assert "tools.mcp.shop: MCP server 'shop'" in said and "it wrote: no licence file at /etc/licence" in said
    assert not (here / "runs").exists()
    with pytest.raises(ConfigError, match=r"tools\.mcp\.shop: .*no-such-program"):
        preflight(with_spec(here, tools={"mcp": {"shop": {"command": ["no-such-program"]}}}))
    preflight(with_spec(here, tools={"mcp": {"shop": {"command": ["no-such-program"]}}}, health={"preflight": False}))


SHOP = """
from mcp.server import MCPServer

server = MCPServer("shop")


@server.tool()
def count() -> int:
    return 3


server.run("stdio")
"""


def test_two_servers_with_one_tool_name_are_both_named(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "shop.py").write_text(SHOP)
    command = [sys.executable, str(tmp_path / "shop.py")]
    servers: dict[str, Any] = {"north": {"command": command}, "south": {"command": command}}
    with pytest.raises(ConfigError, match=r"tools\.mcp\.south: its tool 'count' .*tools\.mcp\.north.*tools\.mcp\.south\.prefix"):
        preflight(with_spec(tmp_path, tools={"mcp": servers}))
    servers["south"]["prefix"] = "south_"
    preflight(with_spec(tmp_path, tools={"mcp": servers}))


def test_a_server_that_does_not_answer_is_waited_for_for_some_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.contrib.preflight.services.ANSWER_S", 0.3)
    slow = {"mcp": {"shop": {"command": ["sleep", "30"]}}}
    with pytest.raises(ConfigError, match=r"no answer within 0\.3 s"):
        preflight(with_spec(tmp_path, tools=slow))
