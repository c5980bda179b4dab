"""Kept episodes, demonstrations and distillation, from which updates learn in addition to their own episodes."""
