"""Python API of `import agentrl`, beyond the contracts of an environment (docs/python.md)."""
