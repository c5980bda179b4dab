"""Tests on cards: `agentrl test` gives each test file the GPUs ("cards") that it declares; see docs/testing.md.

The pytest plugin is `agentrl.contrib.gpu_tests.plugin`; the scheduler begins in `agentrl.contrib.gpu_tests.run`. Nothing here
needs torch.
"""
