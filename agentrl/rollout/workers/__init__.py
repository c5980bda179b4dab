"""Episodes in processes next to the driver's: what a worker is, how it talks to the driver, and the pool that gives it jobs."""
