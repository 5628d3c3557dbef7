"""Measurement of this project's work on one GPU in a few minutes, without Ray: `scripts/gpu-check`."""
