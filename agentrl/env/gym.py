"""Registration of all environments with Gymnasium on import: `gymnasium.make("agentrl.env.gym:KeyValue-v0")`.

Each is registered under its id and its name without the namespace, unless that is taken. Gymnasium imports the module before
the colon. `import agentrl` registers nothing.
"""

from gymnasium.envs.registration import register, registry

from agentrl.env.catalog import list_envs

for _entry in list_envs():
    for _name in dict.fromkeys((_entry.id, _entry.id.rpartition("/")[2])):
        if _name not in registry:
            register(id=_name, entry_point="agentrl.env.catalog:make_env", kwargs={"env_id": _entry.id})
