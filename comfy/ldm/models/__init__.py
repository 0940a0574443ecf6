"""Public names of whole networks."""
