"""Write docs/templates.json: what the renderers find each real chat template to be.

python .ci/templates.py all && python tests/render/report_templates.py
"""

import json
import tomllib
from pathlib import Path

from agentrl.data.trajectory import Message, ToolCall
from agentrl.render.template import TemplateRenderer
from tests.render.real_templates import REAL, Real, tokenizer_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"trl": "trl", "axolotl": "axolotl", "llama.cpp": "llama-cpp-python"}
RECORD = ROOT / "docs" / "templates.json"
BEGIN, END = "<!-- begin: printed by tests/render/report_templates.py -->", "<!-- end -->"


def version(source: str) -> str:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    return str(next(line for line in groups["templates"] if line.startswith(PACKAGES[source]))).replace("==", " ")


def found(real: Real) -> dict[str, object]:
    """What is found out about a template, by the renderer itself."""
    tokenizer = tokenizer_of(real, shown=False)
    renderer = TemplateRenderer(tokenizer)
    marks = renderer._text.form.frame
    usable = TemplateRenderer(tokenizer_of(real)) if real.hides_tools else renderer
    why = renderer.no_tools.partition("cannot be used with tools: ")[2].partition(" (it ends")[0]
    # A turn with reasoning, if the template takes any and the policy samples it.
    so = None if renderer._text.form.reasoning == "inline" or renderer._turns.past_reasoning else "so"
    called = Message("assistant", "", (ToolCall("get", {}, id="abcdefghi"),), reasoning=so)
    answer = Message("tool", "7", tool_call_id="abcdefghi", name="get")
    return {
        "family": real.family,
        "package": version(real.source),
        "template": real.path.name,
        "renderer": type(renderer).__name__,
        "parser": usable.syntax if not usable.no_tools else None,
        "tools": not renderer.no_tools,
        "why_no_tools": why,
        "stop_tokens": tokenizer.convert_ids_to_tokens(list(dict.fromkeys(usable._own_stops))),
        "reasoning_marks": [marks.open.strip(), marks.close] if renderer._text.form.reasoning != "inline" else [],
        "turn_kept_while_tools_answer": usable.keeps(called, [answer]) if not usable.no_tools else None,
        "turn_kept_when_user_speaks": renderer.keeps(Message("assistant", "Yes.", reasoning=so), [Message("user", "And?")]),
        "plain_turn_kept_when_user_speaks": renderer.keeps(Message("assistant", "Yes."), [Message("user", "And?")]),
    }


def main() -> None:
    missing = [real.path for real in REAL if not real.path.is_file()]
    if missing:
        raise SystemExit(f"{len(missing)} templates are missing, {missing[0]} first: python .ci/templates.py all")
    rows = [found(real) for real in REAL]
    RECORD.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(rows)} templates: {RECORD.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
