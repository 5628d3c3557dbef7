"""Integrations of other projects' trainers, which generate with this package."""
