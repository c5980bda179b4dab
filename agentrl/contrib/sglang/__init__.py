"""SGLang servers as an inference engine."""
