"""Router replay: a mixture of experts is trained with the experts that the engine sent its tokens to."""
