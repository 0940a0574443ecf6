"""Public names of network parts."""
