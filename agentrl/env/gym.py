"""Importing this registers every environment with Gymnasium: `gymnasium.make("agentrl.env.gym:KeyValue-v0")`.

Gymnasium imports the module before the colon. `import agentrl` itself registers nothing.
"""

from agentrl.env.catalog import register_gymnasium

register_gymnasium()
