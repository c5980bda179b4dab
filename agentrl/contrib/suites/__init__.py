"""Parts of benchmark suites, and environments of other frameworks."""
