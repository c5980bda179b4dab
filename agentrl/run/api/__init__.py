"""Use from Python: what `import agentrl` offers beyond the contracts of an environment (docs/python.md)."""
