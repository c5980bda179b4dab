"""Sglang."""
