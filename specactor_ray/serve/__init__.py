"""An HTTP server in front of a rollout's request queue: one service, one module for each dialect of its clients."""
