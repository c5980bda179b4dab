"""Environments of other platforms here, and ours there; each needs that platform's own package."""
