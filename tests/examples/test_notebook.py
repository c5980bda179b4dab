"""The notebook in examples/: its cells in order, where an event loop runs; and whole, in a kernel (`make proofs`)."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import proof

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "own_algorithm.ipynb"


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in found if cell["cell_type"] == "code")
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


async def test_its_cells_run_in_order_beside_an_event_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """With three updates; a cell is run in the thread of a running event loop, as a kernel does it."""
    assert asyncio.get_running_loop().is_running()
    space: dict[str, Any] = {"__name__": "__main__"}
    for source in cells():
        exec(compile(source.replace("= 45, 4, 8, 32", "= 3, 2, 2, 4"), "<cell>", "exec"), space)
    said = capsys.readouterr().out
    assert "Vowels, please, soft. -> 0.4" in said and "success 1.000 over 10 tasks" in said
    assert len(space["curve"]) == 3 and space["before"].scored == 4 and "reward " in said
    with pytest.raises(Exception, match="the session is closed"):
        _ = space["loop"].policy.version


@proof
def test_it_runs_in_a_kernel_and_the_model_learns(tmp_path: Path) -> None:
    """From no success to nearly always."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    found = re.search(r"success before ([\d.]+), after ([\d.]+)", said)
    assert found is not None and float(found[1]) <= 0.1 and float(found[2]) >= 0.8, said
