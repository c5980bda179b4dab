"""Checkers and classes."""
