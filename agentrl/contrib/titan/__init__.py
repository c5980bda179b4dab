"""torchtitan as a training engine: its models and its parallelism, with agentrl's packed attention, head and weights."""
