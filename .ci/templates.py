"""Unpack chat templates of public models from packages, for tests/render/test_real_templates.py.

    python .ci/templates.py          TRL's and axolotl's: two wheels of 2.5 MB together
    python .ci/templates.py all      llama.cpp's as well, from a source distribution of 77 MB

The packages are those of the dependency group `templates` in pyproject.toml. They are not installed: only their `.jinja` files
are unpacked, into `templates/` of the running environment, or into AGENTRL_TEMPLATES.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("AGENTRL_TEMPLATES") or Path(sys.prefix) / "templates")


def download(requirement: str, folder: str) -> Path:
    """Download the archive of one package without dependencies, and return its path."""
    print("+ pip download", requirement, flush=True)
    source = ["--no-binary", ":all:"] if requirement.startswith("llama") else []
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *source, "--dest", folder, requirement]
    subprocess.run(command, check=True)
    (archive,) = Path(folder).iterdir()
    return archive


def unpack(archive: Path) -> int:
    """Write an archive's templates below TARGET (a wheel's under their own paths), and return their number."""
    count = 0
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(".jinja"):
                    count += write(PurePosixPath(name), wheel.read(name))
        return count
    with tarfile.open(archive) as source:
        for member in source:
            path = PurePosixPath(member.name)
            if path.suffix == ".jinja" and path.parts[-3:-1] == ("models", "templates"):
                content = source.extractfile(member)
                assert content is not None
                count += write(PurePosixPath("llama.cpp") / path.name, content.read())
    return count


def write(path: PurePosixPath, content: bytes) -> int:
    if path.is_absolute() or ".." in path.parts:
        raise SystemExit(f"templates.py: an archive holds {path}")
    file = TARGET / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return 1


def main(everything: bool) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    for requirement in groups["templates"]:
        if requirement.startswith("llama") and not everything:
            continue
        with tempfile.TemporaryDirectory() as folder:
            count = unpack(download(requirement, folder))
        print(f"  {count} templates", flush=True)


if __name__ == "__main__":
    main(everything="all" in sys.argv[1:])
