"""Samplers that follow the progress of buckets of tasks, or predict success from parameters."""
