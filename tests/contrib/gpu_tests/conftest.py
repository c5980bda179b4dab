"""Not collected with the rest: files that go wrong on purpose."""

collect_ignore = ["bad"]
