"""The environment contract: `ToolEnv`, its spaces, tasks from seeds, and wrappers."""

from agentrl.env.base import StepResult, ToolEnv
from agentrl.env.copying import Snapshot
from agentrl.env.hooks import Teacher
from agentrl.env.seeds import SPLITS, content_split, draw, task_rng
from agentrl.env.spaces import Action, MessagesSpace, Observation, ToolCallSpace
from agentrl.trajectory import Message, Task, ToolCall

__all__ = [
    "SPLITS",
    "Action",
    "Message",
    "MessagesSpace",
    "Observation",
    "Snapshot",
    "StepResult",
    "Task",
    "Teacher",
    "ToolCall",
    "ToolCallSpace",
    "ToolEnv",
    "content_split",
    "draw",
    "task_rng",
]
