"""An environment of its own for a neighbouring platform, whose dependencies do not fit agentrl's extras.

    python .ci/neighbours.py verifiers      makes .neighbours/verifiers and prints its interpreter

It holds the extra of that name and what agentrl's environments need; the constraints come from pyproject.toml.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {"gymnasium", "jsonschema", "pydantic", "regex", "tomli-w"}


def main(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = [line for line in project["dependencies"] if re.split(r"[<>=\[]", line)[0] in NEEDED]
    folder = ROOT / ".neighbours" / extra
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    packages = [*project["optional-dependencies"][extra], *core, "tokenizers"]
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True, stdout=sys.stderr)
    print(python)


if __name__ == "__main__":
    main(sys.argv[1])
