"""Transport of weights from the trainer's ranks to the engine's processes, a bounded bucket at a time."""
