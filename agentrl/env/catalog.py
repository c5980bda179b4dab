"""Find an environment by id, and a tool set, reward spec or config by name."""

from __future__ import annotations

import ast
import inspect
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from agentrl.config.schema import Choice, EnvConfig, RewardConfig, ToolsConfig
from agentrl.env.address import PROTOCOLS, EnvAddress, EnvRequest, known_sources, module_folder
from agentrl.env.tools import TOOL_SOURCES, Tool, ToolSet
from agentrl.reward import Scorer, Services, compile_spec, load_spec, make_context
from agentrl.reward.compile import given_spec
from agentrl.utils.errors import CatalogError, ConfigError, EnvError, fault_text, hint_text, is_alien, place_of, raised_text
from agentrl.utils.files import read_text, shown_path
from agentrl.utils.parsing import module_of
from agentrl.utils.redaction import references, resolve_references, texts
from agentrl.utils.registry import bind, hints_of
from agentrl.utils.search_path import PREFIX, find_file, given_object, here, is_given, load_module, nearest, reward_of, shelves

if TYPE_CHECKING:
    from agentrl.env import ToolEnv


# Content files


def load_tools(path: Path) -> type[ToolSet] | list[Tool]:
    """Load a file's ToolSet class, or if it has none, its tools in order. Raises CatalogError if it has neither, more than one
    set, or a set without a name."""
    module = load_module(path)
    sets = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, ToolSet)]
    # A module may import another set to build on it.
    found = [item for item in sets if item.__module__ == module.__name__]
    if len(found) > 1 or (found and not found[0].name):
        raise CatalogError(f"{path}: expected one ToolSet with a `name`, found {', '.join(item.__name__ for item in found)}")
    tools = [value for value in vars(module).values() if isinstance(value, Tool)]
    if not found and not tools:
        raise CatalogError(f"{path}: no function is marked with @tool, and no class is a ToolSet")
    return found[0] if found else tools


# From an id to an environment, and from a name to a tool set, reward spec or config.
#
# Content is on shelves (utils/search_path.py): the working directory, each folder of AGENTRL_PATH, the shelf that comes with
# agentrl, and last the packages that declare environments in the entry-point group `agentrl.envs`. Listing parses source text
# and never runs it; a module is loaded when one of its environments is built.

GROUP = "agentrl.envs"


class ParameterError(CatalogError):
    """An environment refuses a parameter or its value. `name`: the parameter; None if a required one is missing."""

    def __init__(self, text: str, name: str | None = None) -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True, slots=True)
class EnvEntry:
    """An environment that can be built: its id, short name, location, and the reward spec that it names."""

    id: str
    name: str
    summary: str
    reward: str | None
    path: Path | None
    class_name: str
    entry_point: EntryPoint | None = None
    made: Callable[..., Any] | None = None
    """Given from Python: the class, or a function that returns an environment."""
    suite: str | None = None
    """Constant of the class of a suite's environment (contrib/suites) that names its source, as do `module` and `own`."""
    module: str | None = None
    own: str | None = None

    def lacks_source(self) -> bool:
        """Return True for a suite environment without a source: not installed, no package, no `own` one."""
        if self.suite is None or self.own is not None or self.suite in known_sources():
            return False
        return self.module is None or module_folder(self.module) is None

    def load(self) -> Callable[..., ToolEnv]:
        """Load the class, or the function that makes it. Raises CatalogError, with the cause, if its module does not load."""
        from agentrl.env import ToolEnv

        if self.made is not None and not isinstance(self.made, type):
            return self.made
        loaded: object = self.made
        if self.entry_point is not None:
            try:
                loaded = self.entry_point.load()
            except BaseException as problem:
                if not is_alien(problem):
                    raise
                raise CatalogError(f"{self.id}: {self.class_name!r} does not load: {fault_text(problem)}") from problem
        elif self.path is not None:
            loaded = vars(load_module(self.path)).get(self.class_name)
        if not (isinstance(loaded, type) and issubclass(loaded, ToolEnv)):
            place = "" if self.path is None else f" in {self.path}"
            raise CatalogError(f"{self.id}: {self.class_name}{place} is not a ToolEnv")
        return loaded

    def default_reward(self) -> str | None:
        """Return its reward spec as `reward_of` does; its class is loaded only if its text names no file."""
        if self.reward is None or self.path is None:  # inherited, a function, or in a file that is not read as text
            return reward_of(self.load())
        local = self.path.parent / self.reward
        return str(local if local.is_file() else find_reward(self.reward))


@dataclass(frozen=True)
class EnvRef:
    """A picklable reference from which a worker builds an environment.

    `params` are the keyword arguments of its class; references to variables in them (agentrl/utils/redaction.py) are resolved
    when it is built. `seed`: the default of its first reset. `source` is set when the reference is pickled, so that a worker
    with another working directory finds the same file, or its copy if the shelves were shipped to the worker. `tools`: sets and
    MCP servers in addition to the environment's tools. `wrappers`: by name, innermost first. `at`: the server of a remote
    environment, whose files need not be on this machine. `max_output`: tokens per result, for tools without a limit.
    """

    id: str
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    source: str | None = None
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    wrappers: Sequence[Choice] = ()
    at: EnvAddress | None = None
    max_output: int | None = None

    @classmethod
    def of(cls, env: EnvConfig, tools: ToolsConfig) -> EnvRef:
        """Make the reference of a config's environment, with `env.tools` or else the `tools` section."""
        system = [] if env.system is None else [Choice(name="system_prompt", args={"text": env.system})]
        sandbox = {} if env.sandbox is None else {"sandbox": env.sandbox.model_dump()}
        wrappers, tools = (*env.wrappers, *system), env.tools or tools
        params, at = {**env.params, **sandbox}, EnvAddress.of(env)
        return cls(env.id, params, tools=tools, wrappers=wrappers, at=at, max_output=env.max_output)

    def __reduce__(self) -> tuple[Any, ...]:
        source = self.source
        if source is None and self.at is None:
            with suppress(CatalogError):
                source = None if (path := find_env(self.id).path) is None else str(path)
        params, wrappers = dict(self.params), tuple(self.wrappers)
        return EnvRef, (self.id, params, self.seed, source, self.tools, wrappers, self.at, self.max_output)

    @cached_property
    def entry(self) -> EnvEntry:
        """The catalog entry, looked up once. Raises CatalogError for an unknown id, with the nearest ones."""
        path = None if self.source is None else here(self.source)
        for entry in _entries_of(path) if path is not None and path.is_file() else ():
            if self.id in (entry.id, entry.name):
                return entry
        try:
            return find_env(self.id)
        except CatalogError as problem:
            if path is None:
                raise
            raise CatalogError(
                f"{problem}\nits file was {self.source}, which is not on this machine; only files in envs/ of the "
                "working directory or of AGENTRL_PATH are copied to other machines"
            ) from None

    @cached_property
    def _class(self) -> Callable[..., ToolEnv]:
        if self.at is not None:
            env_class: Callable[..., ToolEnv] = PROTOCOLS[self.at.protocol].env_class()
        else:
            env_class = self.entry.load()
        _check_parameters(self._label, env_class, self.params)
        return env_class

    @property
    def _label(self) -> str:
        return self.entry.id if self.at is None else self.id

    def default_reward(self) -> str | None:
        """Return the environment's reward spec (`reward_of`); None if it names none or its server has it (`card`)."""
        if self.at is None:
            return self.entry.default_reward()
        return None if self.at.is_agentrl else reward_of(self._class)

    def card(self, fresh: bool = False) -> dict[str, Any] | None:
        """Fetch the description from the environment's agentrl server, cached unless `fresh`; None if there is no such server.
        Blocks. Raises ConfigError if the server does not answer, and UserError if it refuses the request."""
        if self.at is None or not self.at.is_agentrl:
            return None
        try:
            found: dict[str, Any] = PROTOCOLS[self.at.protocol].card(self.at, self._request, fresh)
        except EnvError as fault:
            raise ConfigError(f"env.url: {fault}; is this where `agentrl env serve {self.id} --http` runs?") from fault
        return found

    @cached_property
    def _request(self) -> EnvRequest:
        """The request to its server, with references resolved. Raises ConfigError for a variable that is not set."""
        wrappers = [{"name": one.name, "args": resolve_references(one.args, f"env.wrappers.{one.name}")} for one in self.wrappers]
        params = resolve_references(self.params, "env.params")
        return EnvRequest(self.id, params, tuple(self.tools.sets), tuple(wrappers), self.max_output)

    def with_params(self, params: Mapping[str, Any]) -> EnvRef:
        """Return the reference with some parameters replaced."""
        return replace(self, params={**self.params, **params}) if params else self

    def with_gold_user(self) -> EnvRef:
        """Return the reference with its `gold_user`, if any, in place of the user: scripts call no model."""
        from agentrl.env.base import ToolEnv  # not at the top: listing environments loads none

        own = None if self.at is not None else getattr(self._class, "gold_user", None)
        if own in (None, ToolEnv.gold_user):
            return self
        return replace(self, wrappers=(Choice(name="gold_user"), *self.wrappers))

    def build(self, **extra: Any) -> ToolEnv:
        """Build a new environment; `extra` are further arguments of its class, such as `scorer`.

        Raises CatalogError if the class refuses the parameters.
        """
        if self.at is not None and self.at.is_agentrl:
            remote = PROTOCOLS[self.at.protocol].build(self.at, self._request, extra)
            remote.initial_seed = self.seed
            return remote
        from agentrl.env.base import OwnReward, ToolEnv

        scorer = None
        if extra and not isinstance(self._class, type):  # a factory function takes no scorer
            scorer = extra.pop("scorer", None)
        if extra:
            _check_parameters(self._label, self._class, extra)
        place = {} if self.at is None else {"name": self.id, "url": self.at.url, "token": self.at.token()}
        try:
            env = self._class(**{**resolve_references(self.params, "env.params"), **place, **extra})
        except (AttributeError, LookupError, NameError, ArithmeticError) as problem:  # a bug in its code, not a wrong value
            raise CatalogError(f"{self._label}: __init__ {raised_text(problem, self._class)}. Correct it there") from problem
        if not isinstance(env, ToolEnv):
            raise CatalogError(f"{self.id}: it returned {env!r:.80}, expected a ToolEnv")
        if "_env_record" not in vars(env.unwrapped):
            raise CatalogError(
                f"{self._label}: its __init__ does not call the base's. Write `def __init__(self, **base): "
                f"super().__init__(**base)` ({place_of(type(env).__init__)})"
            )
        if isinstance(env.scorer, OwnReward):  # an environment built by reference is scored by the run, or not at all
            env.scorer = None
        env.scorer = scorer or env.scorer
        env.initial_seed = self.seed
        if self.max_output is not None:
            env.limit_output(self.max_output)
        for name in self.tools.args:
            if name not in self.tools.sets:
                raise ConfigError(f"tools.args.{name}: tools.sets has no set of this name{hint_text(name, self.tools.sets)}")
        for name in self.tools.sets:
            add_tool_set(env, name, resolve_references(self.tools.args.get(name, {}), f"tools.args.{name}"))
        for name, server in self.tools.mcp.items():
            env.add_source(TOOL_SOURCES.entry("mcp").make(name, server))
        for choice in self.wrappers:
            from agentrl.env.wrappers import wrap

            env = wrap(env, choice.name, resolve_references(choice.args, f"env.wrappers.{choice.name}"))
        return env


def check_ref(ref: EnvRef) -> None:
    """Raise CatalogError if the environment does not exist or load, ParameterError if it refuses the parameters. Builds nothing,
    and skips environments of agentrl servers."""
    if ref.at is None or not ref.at.is_agentrl:
        _ = ref._class


def list_envs() -> list[EnvEntry]:
    """List all environments by id, each from the first shelf that has it."""
    found: dict[str, EnvEntry] = {}
    for entry in _all_entries():
        found.setdefault(entry.id, entry)
    return sorted(found.values(), key=lambda entry: entry.id)


def find_env(name: str) -> EnvEntry:
    """Find an environment by id, short name or "given:NAME" (utils/search_path.py). Raises CatalogError with the nearest known
    names, ConfigError for a "given:" name that this process does not have."""
    if is_given(name):
        # A class, or a function that makes environments. A spec or function in the class's `reward` is given with it.
        made = given_object(name, "env.id").value
        if not callable(made):
            raise CatalogError(f"{name}: expected a ToolEnv class or a function that returns an environment, not {made!r:.80}")
        short = name.removeprefix(PREFIX)
        if isinstance(made, type) and not getattr(made, "id", "x"):
            made.id = f"given/{short}-v0"  # type: ignore[attr-defined]  # the id in the records of its episodes
        summary = getattr(made, "summary", "") or (inspect.getdoc(made) or "").partition("\n")[0]
        return EnvEntry(name, short, summary, None, None, short, made=made)
    known: list[str] = []
    for entry in _all_entries():
        if name in (entry.id, entry.name):
            return entry
        known += [entry.id, entry.name]
    broken = "".join(f"\n{problem}" for problem in shelf_problems())
    raise CatalogError(f"no environment {name!r}; {nearest(name, known)} (agentrl env list shows all){broken}")


def shelf_problems() -> list[str]:
    """List problems that hide environments on the shelves: files that are not valid Python, and ToolEnv classes without an id,
    which no name finds."""
    found = []
    for path in _env_files():
        try:
            nodes = [] if _entries_of(path) else module_of(read_text(path)).body  # next to others it may be a base class
        except CatalogError as problem:
            found.append(str(problem))
            continue
        for node in nodes:
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("ToolEnv") for base in node.bases):
                fix = f'id = "my/{node.name}-v0"'
                found.append(f"{path}:{node.lineno}: class {node.name} has no id, so no name finds it. Write {fix} in it")
    return found


find_reward = partial(find_file, folder="rewards", suffix=".json", what="reward spec")
find_config = partial(find_file, folder="configs", suffix=".toml", what="config")
find_tools = partial(find_file, folder="tools", suffix=".py", what="tool set")
"""Find the file at a path, or by its NAME on a shelf: `rewards/NAME.json`, `configs/NAME.toml`, `tools/NAME.py`. Raise
CatalogError if not found."""


# -- inside ----------------------------------------------------------------------------------------


def _env_files() -> Iterator[Path]:
    for shelf in shelves():
        folder = shelf / "envs"
        for item in sorted(folder.iterdir()) if folder.is_dir() else ():
            path = item / "env.py" if item.is_dir() else item
            if path.suffix == ".py" and path.is_file():
                yield path


def _all_entries() -> Iterator[EnvEntry]:
    for path in _env_files():
        # One broken file must not hide the other environments; `shelf_problems` reports it.
        with suppress(CatalogError):
            yield from _entries_of(path)
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        # The entry point's name is the environment's id, its value `module:Class`.
        short = point.name.rpartition("/")[2].partition("-v")[0]
        yield EnvEntry(point.name, short, "", None, None, point.value, point)


def _entries_of(path: Path) -> tuple[EnvEntry, ...]:
    """List the classes of a file that set `id` to a string. Raises CatalogError if it is not valid Python."""
    stat = path.stat()
    return _read_entries(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1024)
def _read_entries(path: Path, modified: int, size: int) -> tuple[EnvEntry, ...]:
    try:
        tree = module_of(read_text(path))
    except (SyntaxError, ValueError) as problem:
        raise CatalogError(f"{path}: not a Python file: {problem}") from problem
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        texts: dict[str, str] = {}
        for said in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(said, ast.Assign | ast.AnnAssign) and isinstance(said.value, ast.Constant):
                target = said.target if isinstance(said, ast.AnnAssign) else said.targets[0]
                if isinstance(target, ast.Name) and isinstance(said.value.value, str):
                    texts[target.id] = said.value.value
        if isinstance(node, ast.ClassDef) and texts.get("id"):
            found[node.name] = texts
    name = path.parent.name if path.name == "env.py" else path.stem
    return tuple(
        EnvEntry(
            texts["id"],
            name if len(found) == 1 else f"{name}.{class_name}",
            texts.get("summary", ""),
            texts.get("reward"),
            path,
            class_name,
            suite=texts.get("suite") or None,
            module=texts.get("module"),
            own=texts.get("own"),
        )
        for class_name, texts in found.items()
    )


def add_tool_set(env: ToolEnv, name: str, args: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Add the tools of `tools/NAME.py` on a shelf, or of the file at a path.

    `args` are for a ToolSet. Raises CatalogError if there is no such file or a tool's name is taken, ConfigError for invalid
    arguments, ResourceError if this machine lacks a requirement of the set.
    """
    found = load_tools(find_tools(name))
    for item in found if isinstance(found, list) else found.tools():
        if item.name in env.toolbox:
            raise CatalogError(f"tools.sets: {name!r} has a tool {item.name!r}, which {env.id} already has")
        if isinstance(found, list):
            env.toolbox.add(item)
    if isinstance(found, list):
        if args:
            raise ConfigError(f"tools.args.{name}: its tools have no state and take no arguments; leave it out")
        return
    known = {key: item for key, item in inspect.signature(found).parameters.items() if item.kind is item.KEYWORD_ONLY}
    env.add_set(bind(f"tools.args.{name}", found, known, args))


def _check_parameters(env_id: str, env_class: Callable[..., ToolEnv], params: Mapping[str, Any]) -> None:
    known = _parameters_of(env_class)
    for name in params:
        if name == "sandbox" and name not in known:
            raise ParameterError(f"{env_id} runs nothing in a sandbox, so env.sandbox has no meaning for it; leave it out", name)
        if name not in known:
            raise ParameterError(f"{env_id}: no parameter {name!r}; {nearest(name, sorted(known))}", name)
    try:
        inspect.signature(env_class).bind(**params)
    except TypeError as problem:
        raise ParameterError(f"{env_id}: {problem}; parameters: {', '.join(sorted(known))}") from problem
    for name, value in params.items():
        # Values are validated as JSON. Not checked here: a reference, whose value is known later; a value that is no JSON (given
        # from Python); an annotation that cannot be read.
        if any(references(value)):
            continue
        try:
            text, adapter = json.dumps(value), TypeAdapter(known[name])
        except (TypeError, ValueError, PydanticSchemaGenerationError, PydanticUserError):
            continue
        try:
            adapter.validate_json(text, strict=True)
        except ValidationError as problem:
            raise ParameterError(f"{env_id}: parameter {name} = {value!r:.80}: {problem.errors()[0]['msg']}", name) from None


def _parameters_of(env_class: Callable[..., ToolEnv]) -> dict[str, Any]:
    """Return keyword parameters and their annotations (Any if unknown); with `**` also those of the bases."""
    found: dict[str, Any] = {}
    if not isinstance(env_class, type):
        makers, own = [env_class], 0
    else:
        makers, own = [vars(base)["__init__"] for base in env_class.__mro__ if "__init__" in vars(base)], 1
    for make in makers:
        hints = hints_of(make)
        parameters = list(inspect.signature(make).parameters.values())[own:]
        for one in parameters:
            if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD):
                found.setdefault(one.name, hints.get(one.name, Any))
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return found


# Scorers of environments


def find_spec(env: EnvRef, name: str | None) -> dict[str, Any]:
    """Load a spec by name or path, by default the environment's (a remote one's from its server). Raises ConfigError if it names
    none."""
    card = env.card() if name is None else None
    if card is not None and card["reward"] is not None:
        return load_spec(card["reward"])
    found = name or env.default_reward()
    if found is None:
        raise ConfigError(f"env.reward: {env.id} names no reward spec of its own; set env.reward=NAME_OR_PATH")
    return given_spec(found) if is_given(found) else load_spec(find_reward(found))


def spec_word(env: EnvRef, name: str | None, scorer: Scorer) -> str:
    """Return a shell word that names the spec, by default the environment's, for command lines."""
    found = name or (None if env.at is not None else env.default_reward())
    if found is None or is_given(found):
        return scorer.name
    return shlex.quote(shown_path(found))


def make_scorer(
    spec: dict[str, Any], config: RewardConfig, env: EnvRef | None, *, timeout: float = 120.0, services: Services | None = None
) -> Scorer:
    """Compile a spec, with functions by `config` and gold replays on new environments of `env`.

    `timeout` (seconds) limits the scoring of an episode; `services` default to new ones.
    Raises RewardSpecError for an invalid spec, and for one that replays if `env` is None.
    """
    if env is not None and env.at is None and any(is_given(text) for _, text in texts(spec)):
        env.default_reward()  # gives this process the function of the class, which the spec may name
    context = make_context(config, replay_env=None if env is None else lambda task: env.build(), services=services)
    return compile_spec(spec, context=context, timeout=timeout)


def make_env(env_id: str, *, reward: str | None = None, **params: Any) -> ToolEnv:
    """Build an environment that scores its episodes (for Gymnasium) by `reward` or its class's spec.

    Raises CatalogError for an unknown id or invalid parameters, RewardSpecError for an invalid spec.
    """
    from agentrl.env.base import OwnReward, ToolEnv

    entry = find_env(env_id)
    extra = {"scorer": params.pop("scorer")} if "scorer" in params else {}
    ref = EnvRef(entry.id, params)
    if not extra and (reward is not None or ref.default_reward() is not None):
        extra = {"scorer": make_scorer(find_spec(ref, reward), RewardConfig(), ref)}
    env = ref.build(**extra)
    inner = env.unwrapped
    if not extra and isinstance(inner, ToolEnv) and inner.reward is not None:  # of a function, whose class is known only now
        env.scorer = OwnReward(inner)
    return env
