"""Weight transfer from trainer to engine."""
