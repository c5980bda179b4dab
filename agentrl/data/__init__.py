"""Data of episodes and updates: trajectories, token ledgers, and batches."""
