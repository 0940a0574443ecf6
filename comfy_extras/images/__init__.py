"""Nodes for pictures, by what they do."""
