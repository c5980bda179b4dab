"""A stand-in for the leaderboard's package, in its layout: a few tasks and classes of our own."""
