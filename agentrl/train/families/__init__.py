"""What a model's family needs to be trained: rows kept apart in its mixers, one row a pass, and the probe that decides."""
