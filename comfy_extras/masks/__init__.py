"""Nodes for masks, by what they do."""
