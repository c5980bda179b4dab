"""Share models, data and environments by `agentrl push` and `agentrl pull`, through huggingface_hub."""
