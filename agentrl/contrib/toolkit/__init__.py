"""Toolkit."""
