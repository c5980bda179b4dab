"""Copy of the working tree, in which files may be changed and tests run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def files() -> list[str]:
    """List the files that git tracks or would track, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())


def copy_tree(into: Path) -> bool:
    """Make `into` a copy of the tree. Returns False, and changes nothing, if it is one already."""
    digest = hashlib.sha256()
    names = files()
    for name in names:
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    mark = into / ".copy-of"  # written last, so that an interrupted copy is made again
    if mark.is_file() and mark.read_text() == digest.hexdigest():
        return False
    shutil.rmtree(into, ignore_errors=True)
    for name in names:
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    mark.write_text(digest.hexdigest())
    return True


def environment(*first: Path) -> dict[str, str]:
    """Return this process's environment with `first` at the front of PYTHONPATH, one thread per process, no bytecode files."""
    # Python compares sizes and mtimes in whole seconds, so bytecode of the original could be used for a changed file.
    path = [*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
