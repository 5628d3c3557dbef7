"""The virtual cluster: the product's own loops, queues and policies on one deterministic thread."""
