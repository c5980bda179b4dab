"""Weights & Biases, MLflow and Trackio."""
