"""An HTTP server in front of a rollout's engine: one service, one module for each dialect of its clients."""
