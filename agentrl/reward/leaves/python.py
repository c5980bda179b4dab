"""`python`: a function that the spec names and the run allows."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from agentrl.errors import did_you_mean
from agentrl.reward.leaf import Args, Context, Leaf, Reading, UnscorableError, object_schema
from agentrl.reward.values import brief
from agentrl.reward.view import View


class PythonFunction(Leaf):
    """Calls `context.python[name](view, args)`. A spec can name a function but not define or import one."""

    kind: ClassVar[str] = "python"
    formula: ClassVar[str] = "what the function returns: a number in [0, 1], None, or (number or None, evidence)"
    schema: ClassVar[dict[str, Any]] = object_schema({"name": {"type": "string"}, "args": {}}, ("name",))
    example: ClassVar[dict[str, Any]] = {"name": "politeness", "args": {"language": "en"}}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        name = args["name"]
        if name not in context.python:
            allowed = ", ".join(context.python) or "none"
            hint = did_you_mean(name, context.python)
            raise ValueError(f"name: this run does not allow a function {name!r}; {f'{hint} ' if hint else ''}allowed: {allowed}")
        self.function = context.python[name]

    def blocks(self) -> bool:
        return True

    def read(self, view: View, args: Args) -> Reading:
        try:
            answer: Any = self.function(view, args.get("args"))
        except (Exception, SystemExit) as error:  # user code may raise anything, which must not stop a run
            raise UnscorableError(f"{args['name']} raised {type(error).__name__}: {error}") from error
        value, evidence = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        if value is None:
            return Reading(None, brief(evidence))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
            shown = repr(value) if not isinstance(value, float) or math.isfinite(value) else str(value)
            raise UnscorableError(f"{args['name']} returned {shown[:80]}, expected a number in [0, 1] or None")
        return Reading(float(value), brief(evidence))
