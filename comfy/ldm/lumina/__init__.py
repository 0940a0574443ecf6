"""The network of Lumina 2 and Z-Image."""
