"""Hunyuan3D 2.1."""
