"""A small benchmark in tau2-bench's layout, written for these tests: lamps, and a plug that only the customer can reach."""

import json
from pathlib import Path
from typing import Any

TYPES = """
from itertools import count
from typing import Any, Literal, Optional
from pydantic import BaseModel, Field

CLOCK = count()

class ToolCall(BaseModel):
    id: str = ""
    name: str
    arguments: dict
    requestor: Literal["user", "assistant"] = "assistant"


class Action(BaseModel):
    requestor: Literal["user", "assistant"] = "assistant"
    name: str
    arguments: dict
    compare_args: Optional[list[str]] = None


class EnvFunctionCall(BaseModel):
    env_type: str
    func_name: str
    arguments: dict


class EnvAssertion(EnvFunctionCall):
    assert_value: bool = True


class EvaluationCriteria(BaseModel):
    actions: Optional[list[Action]] = None
    env_assertions: Optional[list[EnvAssertion]] = None
    communicate_info: Optional[list[str]] = None
    nl_assertions: Optional[list[str]] = None
    reward_basis: list[str] = ["DB", "COMMUNICATE"]


class Message(BaseModel):
    role: str
    content: Optional[str] = None
    id: Optional[str] = None
    tool_calls: Optional[list[ToolCall]] = None
    timestamp: str = Field(default_factory=lambda: str(next(CLOCK)))


class InitialState(BaseModel):
    initialization_data: Any = None
    initialization_actions: Optional[list[EnvFunctionCall]] = None
    message_history: Optional[list[Message]] = None


class Task(BaseModel):
    id: str
    user_scenario: str
    initial_state: Optional[InitialState] = None
    evaluation_criteria: Optional[EvaluationCriteria] = None
"""

ENVIRONMENT = """
import json
from types import SimpleNamespace


class Environment:
    def __init__(self, policy, tools, user_tools):
        self.policy, self.tools, self.user_tools = policy, tools, user_tools

    def get_policy(self):
        return self.policy

    def get_tools(self):
        return self.tools.published()

    def get_user_tools(self):
        return self.user_tools.published()

    def _is_mutating_tool(self, name):
        return name in ("switch", "plug")

    def sync_tools(self):
        pass

    def set_state(self, data, actions, messages):
        for action in actions or ():
            self.run(action)

    def run(self, call):
        kit = self.user_tools if call.env_type == "user" else self.tools
        return getattr(kit, call.func_name)(**call.arguments)

    def run_env_assertion(self, assertion, raise_assertion_error=True):
        return self.run(assertion) == assertion.assert_value

    def get_response(self, call):
        kit = self.user_tools if call.requestor == "user" else self.tools
        try:
            found, error = getattr(kit, call.name)(**call.arguments), False
        except Exception as problem:
            found, error = f"Error: {problem}", True
        text = found if isinstance(found, str) else json.dumps(found.model_dump())
        return SimpleNamespace(content=text, error=error)
"""

DOMAIN = """
import json
from pathlib import Path
from types import SimpleNamespace
from pydantic import BaseModel
from tau2.data_model.tasks import Task
from tau2.environment.environment import Environment

DATA = Path(__file__).parents[4] / "data" / "tau2" / "domains" / "NAME"


class Lamp(BaseModel):
    room: str
    on: bool = False
    watts: float = 5.0


class House(BaseModel):
    lamps: dict[str, Lamp]
    owner: str


class Wall(BaseModel):
    plugged: bool = False


def published(name, text, /, **arguments):
    shape = {"type": "object", "title": "parameters", "properties": arguments, "required": list(arguments)}
    function = {"name": name, "description": text, "parameters": shape}
    return SimpleNamespace(name=name, openai_schema={"type": "function", "function": function})


class Agents:
    def __init__(self, db):
        self.db = db

    def published(self):
        name = {"type": "string", "title": "Name"}
        return [published("find_lamp", "Where a lamp is.", name=name),
                published("switch", "Switch a lamp.", name=name, on={"type": "boolean"}),
                published("transfer_to_human_agents", "Hand over.", summary={"type": "string"})]

    def find_lamp(self, name):
        if name not in self.db.lamps:
            raise ValueError(f"Lamp {name} not found")
        return self.db.lamps[name]

    def switch(self, name, on):
        lamp = self.find_lamp(name)
        lamp.on = on
        return lamp

    def transfer_to_human_agents(self, summary):
        return "Transfer successful"

    def assert_on(self, name):
        return self.find_lamp(name).on


class Users:
    def __init__(self, db):
        self.db = db

    def published(self):
        return [published("look", "Look at the plug."), published("plug", "Put it in or out.", put_in={"type": "boolean"})]

    def look(self):
        return "in" if self.db.plugged else "out"

    def plug(self, put_in):
        self.db.plugged = put_in
        return self.look()

    def assert_plugged(self):
        return self.db.plugged


def get_environment(db=None, user_db=None):
    db = db or House.model_validate(json.loads((DATA / "db.json").read_text()))
    return Environment((DATA / "policy.md").read_text(), Agents(db), Users(user_db or Wall()))


def get_tasks(split):
    return [Task.model_validate(row) for row in json.loads((DATA / "tasks.json").read_text())]


def get_tasks_split():
    return json.loads((DATA / "split_tasks.json").read_text())
"""

SWITCH = {"name": "switch", "arguments": {"name": "desk", "on": True}}
HISTORY = [
    {"role": "user", "content": "Is the desk lamp there?"},
    {"role": "assistant", "tool_calls": [{"id": "h1", "name": "find_lamp", "arguments": {"name": "desk"}}]},
    {"role": "tool", "id": "h1", "content": "{}"},
    {"role": "assistant", "content": "It is in the study."},
]
BEGUN = {"env_type": "assistant", "func_name": "switch", "arguments": {"name": "hall", "on": True}}


def find(name: str) -> dict[str, Any]:
    return {"name": "find_lamp", "arguments": {"name": name}}


def task(name: str, scenario: str, *actions: Any, begins: Any = None, **criteria: Any) -> dict[str, Any]:
    state = {} if begins is None else {"initial_state": begins}
    return {"id": name, "user_scenario": scenario, **state, "evaluation_criteria": {"actions": [*actions], **criteria}}


TASKS = [
    task("switch", "Your desk lamp is to be on.", find("dask"), SWITCH, communicate_info=["the study", "1200"]),
    task("nothing", "You want a lamp that glows.", reward_basis=["DB"]),
    task(
        "[far_plug]out[PERSONA:None]",
        "Your lamp is dark.",
        *(SWITCH, {"requestor": "user", "name": "plug", "arguments": {"put_in": True}}),
        env_assertions=[
            {"env_type": "user", "func_name": "assert_plugged", "arguments": {}},
            {"env_type": "assistant", "func_name": "assert_on", "arguments": {"name": "desk"}},
        ],
        reward_basis=["ENV_ASSERTION"],
    ),
    task(
        "transfer",
        "You want a person.",
        {"name": "transfer_to_human_agents", "arguments": {"summary": "a person"}, "compare_args": []},
        *(find("desk"), find("desk")),
        reward_basis=["DB", "ACTION"],
    ),
    task(
        "polite", "You want a kind word.", actions=None, nl_assertions=["The agent is kind"], reward_basis=["DB", "NL_ASSERTION"]
    ),
    task(
        "history",
        "Go on about the desk lamp.",
        SWITCH,
        begins={"message_history": HISTORY, "initialization_actions": [BEGUN]},
        reward_basis=["DB"],
    ),
    task(
        "refused",
        "A lamp that is not there is to be on, and the desk lamp.",
        *({"name": "switch", "arguments": {"name": "dask", "on": True}}, SWITCH),
        reward_basis=["DB"],
    ),
]
SPLITS = {
    "base": ["switch", "nothing", "[far_plug]out[PERSONA:None]", "transfer", "polite"],
    "train": ["switch", "[far_plug]out[PERSONA:None]", "transfer"],
    "test": ["nothing", "polite"],
    "full": [task["id"] for task in TASKS],
}


def write_source(folder: Path) -> Path:
    """Write the benchmark, all four domains alike."""
    code, data = folder / "src" / "tau2", folder / "data" / "tau2"
    files = {
        folder / "pyproject.toml": '[project]\nname = "tau2"\nversion = "1.0.0"\n',
        # A suite runs neither: they would need the benchmark's runner and its clients of models.
        code / "__init__.py": "raise RuntimeError('the package itself is not to be imported')\n",
        code / "agent/llm_agent.py": 'import no_such_package\nAGENT_INSTRUCTION = """\nBe useful.\n""".strip()\n'
        'SYSTEM_PROMPT = """\n<how>{agent_instruction}</how>\n<policy>{domain_policy}</policy>\n""".strip()\n',
        code / "orchestrator/orchestrator.py": 'DEFAULT_FIRST_AGENT_MESSAGE = Say("assistant", "House of Lamps.")\n',
        code / "user/user_simulator.py": 'SYSTEM_PROMPT = """{global_user_sim_guidelines_with_persona}|{instructions}"""\n',
        code / "data_model/tasks.py": TYPES,
        code / "data_model/message.py": TYPES,
        code / "environment/environment.py": ENVIRONMENT,
        data / "user_simulator/simulation_guidelines.md": "Play a customer.<PERSONA_GUIDELINES>",
        data / "user_simulator/simulation_guidelines_tools.md": "Play a customer with tools.<PERSONA_GUIDELINES>",
    }
    lamps = {name: {"room": room} for name, room in (("desk", "study"), ("hall", "hall"), ("bed", "attic"))}
    for name in ("mock", "airline", "retail", "telecom"):
        here = data / "domains" / name
        files[code / f"domains/{name}/environment.py"] = DOMAIN.replace("NAME", name)
        files[here / "db.json"] = json.dumps({"lamps": lamps, "owner": name})
        files[here / "policy.md"] = f"Rules of {name}."
        files[here / "tasks.json"] = json.dumps(TASKS)
        files[here / "split_tasks.json"] = json.dumps(SPLITS)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
