"""The public JSON Schema test suite against `agentrl.utils.schemas`: make peers.

npm's `@json-schema-org/tests` has no tests itself (it installs them from GitHub); the sdist of Python's jsonschema carries the
same suite, with the newer drafts. A case is equal, refused by name (BadSchemaError), or not offered; anything else fails.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from agentrl.utils import schemas
from agentrl.utils.schemas import BadSchemaError, checked_validator, first_fault

ROOT = Path(__file__).resolve().parents[2]
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
NOT_OFFERED = {
    "format": "formats are notes: nothing is checked against them",
    "content": "contentEncoding and contentMediaType are notes",
    "format-assertion": "formats are notes: nothing is checked against them",
}
"""File, or folder of files, of the suite: the reason."""

pytestmark = pytest.mark.skipif(not os.environ.get("AGENTRL_PEERS"), reason="another project's tests; `make peers` runs them")


@pytest.fixture(scope="session")
def suite() -> Path:
    """The folder `tests` of the suite, from the sdist of the installed jsonschema."""
    place = ROOT / "build" / "peers" / f"jsonschema-{version('jsonschema')}"
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        wanted = f"jsonschema=={version('jsonschema')}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
        subprocess.run([*command, "--dest", str(place.parent), wanted], check=True)
        with tarfile.open(place.parent / f"{place.name}.tar.gz") as archive:
            archive.extractall(place.parent, filter="data")
    return place / "json" / "tests"


def cases(folder: Path, draft: str) -> Iterator[tuple[str, Any, Any, bool]]:
    """Name, schema, instance, and whether it is valid."""
    for file in sorted((folder / draft).rglob("*.json")):
        part = file.relative_to(folder / draft)
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            for one in group["tests"]:
                yield f"{part}: {group['description']}: {one['description']}", schema, one["data"], one["valid"]


def outcome(name: str, schema: Any, instance: Any, valid: bool) -> str:
    words = {part.removesuffix(".json") for part in Path(name.partition(":")[0]).parts}
    if words & NOT_OFFERED.keys():
        return "not offered"
    try:
        found = first_fault(checked_validator(schema), instance) is None
    except BadSchemaError as problem:
        return f"refused: {problem}"
    if found != valid and words & {"ecmascript-regex", "zeroTerminatedFloats"}:
        return "not offered"  # 1.0 is an integer, and patterns are Python's: \\d, \\w and \\s are Unicode's
    return "equal" if found == valid else "otherwise"


def test_the_suite_gives_equal_answers_or_a_refusal_by_name(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "SCHEMA_S", 60.0)  # the machine may be busy
    table: dict[str, Counter[str]] = {}
    otherwise, refused = [], set[str]()
    for draft in DRAFTS:
        counts = table[draft] = Counter()
        for name, schema, instance, valid in cases(suite, draft):
            found = outcome(name, schema, instance, valid)
            counts[found.partition(":")[0]] += 1
            if found == "otherwise":
                otherwise.append(f"{draft}/{name}")
            if found.startswith("refused"):
                refused.add(found)
    assert otherwise == []
    rows = [f"| {draft} | {c['equal']:,} | {c['refused']} | {c['not offered']} |" for draft, c in table.items()]
    print("\n| draft | equal | refused by name | not offered |\n|---|--:|--:|--:|", *rows, sep="\n")
    kinds = {re.sub(r"at .*?: ('[^']*' |a reference to '[^']*')?", "", text).partition(";")[0] for text in refused}
    print(*sorted(kinds), sep="\n")
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    assert all(row in page for row in rows), "docs/testing.md has another table"
