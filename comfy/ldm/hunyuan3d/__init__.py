"""Hunyuan3D."""
