"""Learning curves as tests of the whole: `python -m tests.curves` (docs/testing.md)."""
