"""`agentrl push` and `agentrl pull` share models, data and environments through huggingface_hub."""
