"""The virtual cluster: the package's own loops, queues and policies on one deterministic thread."""
