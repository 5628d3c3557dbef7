"""What one GPU does with this project's work, measured in a few minutes without Ray or vLLM: `scripts/gpu-check`."""
