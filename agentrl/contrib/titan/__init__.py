"""torchtitan as a training engine: its models and parallelism, with agentrl's packed attention, head and weights."""
