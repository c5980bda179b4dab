"""Router replay: train a mixture of experts with the experts that the engine chose for each token."""
