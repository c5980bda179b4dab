"""The server keeps what it shows to the browser of whoever started it."""

from pathlib import Path

import pytest

from agentrl.contrib.view.server import assets
from tests.contrib.view.test_api import Asking, client
from tests.run.made_folders import episode, run_folder


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Asking:
    at = tmp_path_factory.mktemp("runs")
    (at / "secret.json").write_text('{"password": 1}')
    run_folder(at / "one", {"step_000001": [episode(1)]})
    return client(at)


HOSTS = {
    403: ("evil.example", "127.0.0.1.evil.example:8300", "192.168.0.4:8300", "", "localhost:8300@evil.example", "127.0.0.1:x"),
    200: ("127.0.0.1:8300", "localhost", "LOCALHOST:9", "[::1]:8300", "[::1]"),
}
SITES = {403: ("cross-site", "same-site"), 200: ("same-origin", "none")}


@pytest.mark.parametrize("status, host", [(status, host) for status, hosts in HOSTS.items() for host in hosts])
def test_only_loopback_is_answered(asking: Asking, host: str, status: int) -> None:
    """A page whose name was bound to 127.0.0.1 after it was loaded sends its own name."""
    for path in ("/", "/api/runs"):
        assert asking.get(path, headers={"host": host}).status_code == status


@pytest.mark.parametrize("status, site", [(status, site) for status, sites in SITES.items() for site in sites])
def test_data_is_for_the_viewers_own_page(asking: Asking, site: str, status: int) -> None:
    """Another site's page can ask without being able to read; a link to the page itself works."""
    assert asking.get("/api/runs/one/episodes/step_000001.0", headers={"sec-fetch-site": site}).status_code == status
    assert asking.get("/", headers={"sec-fetch-site": site}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(asking: Asking, method: str) -> None:
    for path in ("/", "/api/runs", "/api/runs/one"):
        assert asking.request(method, path).status_code == 405


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/none", "/none.js", "/run/one"])
def test_every_answer_has_the_headers_and_allows_no_other_origin(asking: Asking, path: str) -> None:
    found = asking.get(path, headers={"origin": "http://evil.example"})
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert found.headers["x-content-type-options"] == "nosniff" and found.headers["x-frame-options"] == "DENY"
    assert not [name for name in found.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "path",
    ["/../secret.json", "/%2e%2e/secret.json", "/..%2f..%2fsecret.json", "/assets/../../api.py", "/%2fetc%2fpasswd.json",
     "//etc/hosts.json", "/server.py"],
)  # fmt: skip
def test_no_path_leads_out_of_the_page(asking: Asking, path: str) -> None:
    found = asking.get(path)
    assert found.status_code == 404 or found.content == assets()["index.html"]
    assert b"password" not in found.content and b"import" not in found.content[:200]


def test_the_server_listens_on_loopback_only_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    import os
    import signal
    import subprocess
    import sys
    import urllib.request

    run_folder(tmp_path / "one", {"step_000001": [episode(1)]})
    command = [sys.executable, "-m", "agentrl.cli.main", "view", str(tmp_path), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None and process.stderr is not None
        said = process.stdout.readline()
        address = said.split(" at ")[1].split()[0]
        try:
            assert said.startswith("agentrl view: 1 runs at http://127.0.0.1:")
            with urllib.request.urlopen(f"{address}/api/runs/one/facets", timeout=10) as answer:
                assert b'"value":"numbers"' in answer.read()
            listening = Path("/proc/net/tcp").read_text().splitlines()[1:]
            port = f":{int(address.rsplit(':', 1)[1]):04X}"
            assert [line.split()[1] for line in listening if line.split()[1].endswith(port) and line.split()[3] == "0A"] == [
                f"0100007F{port}"
            ]
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=20)
        assert process.returncode == 0 and rest == ("", "")
