"""Leaf kinds of reward specs, one file per subject, each registered in `agentrl.reward.leaf.LEAVES`."""
