"""Which task each group gets: the contract in `base`, one small file a sampler, `source` keeps the accounts."""
