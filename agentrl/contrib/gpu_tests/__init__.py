"""GPU tests: `agentrl test` gives each test file the GPUs ("cards") that it declares; see docs/testing.md.

The pytest plugin is `agentrl.contrib.gpu_tests.plugin`; the scheduler starts in `agentrl.contrib.gpu_tests.run`. This package
does not need torch.
"""
