"""Jina's text encoder."""
