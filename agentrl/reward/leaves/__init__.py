"""The leaf kinds of a reward spec, one file per subject; each registers itself in `agentrl.reward.leaf.LEAVES`."""
