"""Chroma Radiance."""
