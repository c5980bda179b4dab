"""Service of `agentrl env serve ID --http`: an environment of the catalog, as clients ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from agentrl.config.schema import Choice, RewardConfig, ToolsConfig
from agentrl.contrib.remote_envs import wire
from agentrl.data.trajectory import Json
from agentrl.env import Task, ToolEnv
from agentrl.env.address import Asked
from agentrl.env.catalog import EnvRef, find_spec, make_scorer
from agentrl.utils.errors import CatalogError, hint_text
from agentrl.utils.redaction import references


class EnvOffer:
    """One environment of this machine's shelves. A client's parameters override `ref.params`; its wrappers and tool sets, by
    name, are of this machine's shelves too."""

    def __init__(self, ref: EnvRef, digest: Callable[[EnvRef], str | None] = lambda ref: None) -> None:
        """`digest`: of the environment's files, so that a client sees when its code changes."""
        self.ref, self._digest = ref, digest
        self._refs: dict[bytes, EnvRef] = {}

    @property
    def name(self) -> str:
        return self.ref.entry.id

    @property
    def summary(self) -> str:
        return self.ref.entry.summary

    def build(self, asked: Asked) -> ToolEnv:
        """Raises CatalogError for another id, unfit parameters or unknown tool sets, ConfigError for unfit wrappers."""
        return self._ref(asked).build()

    def play(self) -> ToolEnv:
        return self.ref.build(**({} if self._scorer is None else {"scorer": self._scorer}))

    @cached_property
    def _scorer(self) -> object | None:
        if self.ref.default_reward() is None:
            return None
        return make_scorer(find_spec(self.ref, None), RewardConfig(), self.ref)

    @cached_property
    def _host_params(self) -> frozenset[str]:
        return frozenset(getattr(self.ref.entry.load(), "host_params", ()))

    def _ref(self, asked: Asked) -> EnvRef:
        entry = self.ref.entry
        if asked.id not in (entry.id, entry.name):
            raise CatalogError(
                f"this server has {entry.id} ({entry.name}), not {asked.id!r}{hint_text(asked.id, (entry.id, entry.name))}"
            )
        # Kept, so that an episode does not look its class up again.
        key = wire.dumps(asked.row())
        if key not in self._refs:
            if len(self._refs) > 1000:
                self._refs.clear()
            for name in asked.sets:
                if Path(name).name != name or name.startswith("~") or name.endswith(".py"):
                    raise CatalogError(f"tools.sets: {name!r} is a path; a client names tool sets on the shelves of the server")
            for name in sorted(self._host_params & asked.params.keys()):
                if asked.params[name] != self.ref.params.get(name):
                    raise CatalogError(
                        f"params.{name} names a thing on the server's machine, and is the server's to set: agentrl env serve "
                        f"{entry.name} {name}=..."
                    )
            for place, text in references({"params": asked.params, "wrappers": asked.wrappers}):
                raise CatalogError(f"{place} = {text!r}: a client has no variables of the server's machine")
            wrappers = tuple(Choice(**row) for row in asked.wrappers)
            tools = ToolsConfig(sets=[*self.ref.tools.sets, *asked.sets], args=self.ref.tools.args)
            params = {**self.ref.params, **asked.params}
            asked_for = replace(self.ref, params=params, tools=tools, wrappers=(*self.ref.wrappers, *wrappers))
            self._refs[key] = replace(asked_for, max_output=asked.max_output or self.ref.max_output)
        return self._refs[key]

    def card(self, asked: Asked) -> dict[str, Json]:
        ref = self._ref(asked)
        env = ref.build()
        inner = env.unwrapped
        try:
            env.make_task(0, env.splits[0])  # a class that makes none is refused here, before a client asks
            return {
                "env": {"id": env.id, "name": ref.entry.name, "summary": self.summary},
                "splits": list(env.splits),
                "order_free": env.order_free,
                "idle_share": env.idle_share,
                "scripted": env.user_repeats,
                "task_count": {split: env.task_count(split) for split in env.splits},
                "toolbox": wire.toolbox_row(env.toolbox),
                "reward": None if ref.default_reward() is None else find_spec(ref, None),
                "gold": _has_gold(env),
                "teacher": _has_gold(env) or (isinstance(inner, ToolEnv) and type(inner).teacher is not ToolEnv.teacher),
                "files": self._digest(ref),
            }
        finally:
            env.close()


def _has_gold(env: ToolEnv) -> bool:
    task: Task = env.make_task(0, env.splits[0])
    try:
        env.gold_turns(task)
    except NotImplementedError:
        return False
    return True
