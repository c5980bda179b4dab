"""Runs: folder, display, curve, and the session that connects their parts."""
