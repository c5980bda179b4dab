"""Test files that go wrong, one way each; docs/testing.md has what `agentrl test` says of them, and the command.

pytest does not collect them unless they are named (tests/contrib/gpu_tests/conftest.py).
"""
