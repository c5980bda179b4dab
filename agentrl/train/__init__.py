"""The trainer: engine, roles, updates, checkpoints. Import from the modules."""
