"""Models that take images (Qwen2.5-VL, Qwen3-VL): in the trainer, the embedded engine and vLLM."""
