"""Environments of other platforms here, and ours there; each module needs that platform's package."""
