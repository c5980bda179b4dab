"""The tools of an environment: its class's own, those of tool sets, and those of sessions with a source outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from agentrl.env.hooks import EnvHooks
from agentrl.errors import EnvError
from agentrl.tool import CountTokens, Tool, Toolbox, ToolSession, ToolSet, ToolSource
from agentrl.tool.sets import tool_methods
from agentrl.tool.toolbox import Waiting


class ToolSide(EnvHooks):
    """What a `ToolEnv` offers to the policy (`toolbox`) and to its user (`user_toolbox`), and where it is from."""

    toolbox: Toolbox
    user_toolbox: Toolbox
    _class_tools: ClassVar[tuple[dict[str, Tool], dict[str, Tool]]]

    def _init_toolboxes(self, count_tokens: CountTokens) -> None:
        """Begin with the class's own tools."""
        offered, users = self._tables()
        self.toolbox = Toolbox.shared(offered, self, count_tokens)
        self.user_toolbox = Toolbox.shared(users, self, count_tokens)
        if self.max_output is not None:
            self.limit_output(self.max_output)
        self._tools_before, self._user_tools_before = self.toolbox.table, self.user_toolbox.table
        self._sources: tuple[ToolSource, ...] = ()
        self._sessions: list[ToolSession] = []
        self._set_makers: tuple[Callable[[], ToolSet], ...] = ()
        self._sets: dict[str, ToolSet] = {}

    @property
    def queued(self) -> str:
        """What this environment queues for with others (a sandbox, say), in words; "" if for nothing. Such time is not counted
        against the episode."""
        return next((text for item in self._sets.values() if (text := item.queued)), "")

    def limit_output(self, tokens: int) -> None:
        """Cut the answers of tools that have no `max_output` of their own to so many tokens, in place of the class's."""
        self.toolbox.max_output = self.user_toolbox.max_output = tokens

    def add_source(self, source: ToolSource) -> None:
        """Tools from outside (an MCP server, say): every later episode opens its own session. Those with `Options(by="user")` are
        the user's."""
        self._sources += (source,)

    @property
    def has_sources(self) -> bool:
        """Whether an episode offers tools from outside."""
        return bool(self._sources)

    def add_set(self, make: Callable[[], ToolSet]) -> None:
        """Tools with a state of their own, which `make` makes for every later episode. Raises what `make` raises, and TypeError
        if one of its names is taken."""
        made = make()
        for item in made.tools():
            (self.user_toolbox if item.options.by == "user" else self.toolbox).add(item)
        self._set_makers += (make,)

    def tool_set(self, name: str) -> ToolSet:
        """The set of this name, as the running episode (or the last one) has it. Raises EnvError if there is none."""
        if name not in self._sets:
            raise EnvError(f"{self.id}: no tool set {name!r} in an episode; there are {', '.join(self._sets) or 'none'}")
        return self._sets[name]

    @property
    def waiting(self) -> Sequence[Waiting]:
        """The calls in progress, the policy's and the user's."""
        return [*self.toolbox.waiting, *self.user_toolbox.waiting]

    @classmethod
    def _tables(cls) -> tuple[dict[str, Tool], dict[str, Tool]]:
        """The class's tools by name, the policy's and the user's, read once: methods in order of definition, then `tools`."""
        if "_class_tools" not in cls.__dict__:
            found: list[Tool | Callable[..., Any]] = [*tool_methods(cls), *cls.tools]
            users = [item for item in found if isinstance(item, Tool) and item.options.by == "user"]
            offered = Toolbox(item for item in found if item not in users)
            cls._class_tools = {item.name: item for item in offered}, {item.name: item for item in Toolbox(users)}
        return cls._class_tools

    async def _open_sessions(self) -> None:
        self._sets, owners = {}, dict[str, str]()
        for source in self._sources:
            session = source.session()
            self._sessions.append(session)
            for item in await session.open():
                box = self.user_toolbox if item.options.by == "user" else self.toolbox
                if item.name in box:
                    raise EnvError(
                        f"{session}: its tool {item.name!r} has the name of one of {owners.get(item.name, self.id)}; set a "
                        "`prefix` for one of them, or leave the tool out: give the others in `tools`"
                    )
                box.add(item)
                owners[item.name] = str(session)
        for make in self._set_makers:
            made = make()
            self._sets[made.name] = made
            await made.open()

    async def _close_sessions(self) -> None:
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            await session.close()
        for item in self._sets.values():
            await item.close()
