"""Constants."""
