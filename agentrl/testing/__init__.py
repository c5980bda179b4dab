"""Tests on cards: `agentrl test` gives each test file the GPUs ("cards") that it declares; see docs/testing.md.

The pytest plugin is `agentrl.testing.plugin`; the scheduler begins in `agentrl.testing.run`. Nothing here needs torch.
"""
