"""Create a separate environment for another platform, whose dependencies conflict with agentrl's extras.

    python .ci/integrations.py NAME      creates .integrations/NAME and prints its interpreter

`verifiers` and `openenv` get the extra and, if there is one, the dependency group of that name (OpenEnv's package, only for
tests), at the versions of pyproject.toml. `trl` and `verifiers-latest` are only for benchmarks, at the compared versions. All
get the requirements of agentrl's environments. `bfcl` is a folder of packages instead of an environment: the leaderboard's
package with the imports of its classes and parsers, without the required model clients. A complete environment is not created
again.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {"gymnasium", "httpx", "jsonschema", "pydantic", "regex", "tomli-w"}
# Installed in this order: torch first and pinned, so that no later package installs another build.
PEERS = {
    "trl": [["torch==2.13.0"], ["trl==1.16.0", "transformers==5.19.0", "jmespath"]],
    "verifiers-latest": [["verifiers==0.4.0", "uv"]],
}

# Unpacked into a folder without dependencies: the other requirements in their metadata are not needed.
FOLDERS = {
    "bfcl": ["bfcl-eval==2026.3.23", "mpmath==1.3.0", "filelock", "overrides", "rank_bm25==0.2.2", "tenacity",
             "tree_sitter==0.21.3", "tree-sitter-java==0.21.0", "tree-sitter-javascript==0.21.4"],
}  # fmt: skip


def requirements(name: str) -> list[list[str]]:
    """Return the requirements of a peer, or of an extra and group of pyproject.toml, and of agentrl's environments."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, group = read["project"], read["dependency-groups"].get(name, [])
    core = [line for line in project["dependencies"] if re.split(r"[<>=\[]", line)[0] in NEEDED]
    if name in PEERS:
        return [*PEERS[name], core]
    return [[*project["optional-dependencies"][name], *group, *core, "tokenizers"]]


def unpacked(folder: Path, packages: list[str]) -> Path:
    """Unpack these packages into a folder, and return it."""
    done = folder / "installed"
    if not done.exists() or done.read_text() != repr(packages):
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--upgrade",
            "--no-deps",
            "--target",
            str(folder),
            *packages,
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        done.write_text(repr(packages))
    return folder


def main(name: str) -> None:
    folder = ROOT / ".integrations" / name
    if name in FOLDERS:
        print(unpacked(folder, FOLDERS[name]))
        return
    python = folder / "bin" / "python"
    installs = requirements(name)
    wanted = repr(installs)
    done = folder / "installed"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if not done.exists() or done.read_text() != wanted:
        for packages in installs:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True, stdout=sys.stderr)
        done.write_text(wanted)  # last, so that an interrupted installation is repeated
    print(python)


if __name__ == "__main__":
    main(sys.argv[1])
