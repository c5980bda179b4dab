"""What happens to a conversation that outgrows its context: the contract in `base`, one small file per policy."""
