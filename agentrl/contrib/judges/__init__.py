"""The reward leaf `judge`, whose models are behind an API or on engines of the run's own."""
