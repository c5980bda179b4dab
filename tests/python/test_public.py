"""The public names and their signatures, kept on purpose: who changes one of them changes this list."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import agentrl

FROZEN = Path(__file__).with_name("public.json")
PROBE = """
import json, sys
import agentrl
heavy = [name for name in ("torch", "ray", "vllm", "transformers", "numpy", "pydantic", "gymnasium") if name in sys.modules]
names = sorted(set(agentrl.__all__) - set(dir(agentrl)))
from agentrl import Message, load_run
light = [name for name in ("torch", "ray", "vllm", "transformers") if name in sys.modules]
import agentrl.rollout.engine  # the room, which is a call as well
call = callable(agentrl.rollout) and callable(agentrl.train)
print(json.dumps({"heavy": heavy, "missing": names, "light": light, "call": call}))
"""


def signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return type(value).__name__


def public() -> dict[str, Any]:
    """Every public name with its signature; of classes of the step-wise loop and of results, of each public member too."""
    found: dict[str, Any] = {}
    for name in sorted(set(agentrl.__all__) - {"__version__"}):
        value = getattr(agentrl, name)
        found[name] = "room" if name == "env" else signature(value)
        if isinstance(value, type) and value.__module__.startswith(("agentrl.run.api", "agentrl.run")):
            for member in sorted(vars(value)):
                if not member.startswith("_"):
                    held = getattr(value, member)
                    kind = "property" if isinstance(held, property) else signature(getattr(held, "_work", held))
                    found[f"{name}.{member}"] = kind
    return found


def test_public_names_and_signatures_are_the_frozen_ones() -> None:
    """To change them on purpose: python -m tests.python.test_public"""
    assert public() == json.loads(FROZEN.read_text())


def test_importing_agentrl_is_light_and_its_names_come_when_they_are_used() -> None:
    out = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(out.stdout)
    assert found == {"heavy": [], "missing": [], "light": [], "call": True}


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(public(), indent=2) + "\n")
