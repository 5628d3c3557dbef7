"""From a loaded configuration to one that is settled and checked, before anything starts."""
