"""Shared code of benchmark suites, and benchmarks that run in their own interpreter."""
