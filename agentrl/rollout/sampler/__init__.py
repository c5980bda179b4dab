"""Which task each group gets: the contract in `base`, one small file per sampler, `source` does the bookkeeping."""
