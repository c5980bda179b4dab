"""Rollout workers: episodes in separate processes, their channel to the driver, and the pool that assigns jobs."""
