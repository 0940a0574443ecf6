"""Reversible changes of a loaded model: weight patches, object patches, hooks, wrappers."""
