"""Tensor and expert parallelism of trained models."""
