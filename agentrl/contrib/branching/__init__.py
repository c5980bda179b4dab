"""Episodes that branch off other episodes of their group (`[rollout.branch]`), and the advantage `tree`."""
