"""The error of what cannot be scored."""


class UnscorableError(Exception):
    """A leaf cannot score this episode (gold of the wrong shape, no state): its value is None, never 0."""


class FailedTwinError(UnscorableError):
    """The environment of a replay failed: another replay of the same calls may not."""
