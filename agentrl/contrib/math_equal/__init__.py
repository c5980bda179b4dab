"""Compare answers as mathematics: the reward leaf `math.equal`."""
