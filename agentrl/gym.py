"""Importing this registers every environment with Gymnasium: `gymnasium.make("agentrl.gym:KeyValue-v0")`.

Gymnasium imports the module before the colon. `import agentrl` itself registers nothing.
"""

from agentrl.catalog import register_gymnasium

register_gymnasium()
