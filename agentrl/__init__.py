"""agentrl: reinforcement learning for multi-turn, tool-calling language-model agents.

Importing this package is cheap and has no side effects: no torch, no ray, no registration. See
`docs/design.md` for the rooms and `agentrl --help` for the commands.
"""

__version__ = "0.1.0"
