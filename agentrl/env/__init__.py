"""The environment contract: `ToolEnv`, its spaces, tasks from seeds, and wrappers."""

from agentrl.data.trajectory import Message, Task, ToolCall
from agentrl.env.authoring import SPLITS, Teacher, content_split, draw, task_rng
from agentrl.env.base import StepResult, ToolEnv
from agentrl.env.copying import Snapshot
from agentrl.env.spaces import Action, MessagesSpace, Observation, ToolCallSpace

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
