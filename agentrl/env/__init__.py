"""The environment contract: `ToolEnv`, its tools, spaces, tasks from seeds, and wrappers."""

from agentrl.data.trajectory import Message, Task, ToolCall
from agentrl.env.authoring import SPLITS, Teacher, content_split, draw, task_rng
from agentrl.env.base import StepResult, ToolEnv
from agentrl.env.call_options import Options, Problem
from agentrl.env.copying import Snapshot
from agentrl.env.spaces import Action, MessagesSpace, Observation, ToolCallSpace
from agentrl.env.toolbox import Toolbox
from agentrl.env.tools import Hidden, Tool, ToolSession, ToolSet, ToolSource, tool

__all__ = [
    "SPLITS", "Action", "Hidden", "Message", "MessagesSpace", "Observation", "Options", "Problem", "Snapshot", "StepResult",
    "Task", "Teacher", "Tool", "ToolCall", "ToolCallSpace", "ToolEnv", "ToolSession", "ToolSet", "ToolSource", "Toolbox",
    "content_split", "draw", "task_rng", "tool",
]  # fmt: skip
