"""Nodes for the Wan video models, by what the model is given."""
