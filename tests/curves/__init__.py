"""Learning curves as tests of the whole: `make curves` (docs/testing.md)."""
