"""Episodes: the engine protocol, the episode loop, groups, and the group ledger (staleness)."""
