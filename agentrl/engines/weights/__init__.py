"""How weights travel from the trainer's ranks to the engine's processes, a bounded bucket at a time."""
