"""Nodes that prepare pictures and texts for training, by what they work on."""
