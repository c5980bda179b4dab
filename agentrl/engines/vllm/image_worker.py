"""Runs inside vLLM's worker processes, if the model takes images: its class is known there once this file is imported."""

from __future__ import annotations

from agentrl.engines.vllm.image_prompts import register
from agentrl.engines.vllm.vllm_worker import WeightReceiver

register()


class VisionReceiver(WeightReceiver):
    """See `WeightReceiver`."""
