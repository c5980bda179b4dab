"""Weight transfer from the trainer's ranks to the engine's processes, in buckets of bounded size."""
