"""Public names of the T2I adapters."""
