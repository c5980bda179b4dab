"""Supervised training, DPO and reward models on conversations, pairs and recorded episodes (`[data]`)."""
