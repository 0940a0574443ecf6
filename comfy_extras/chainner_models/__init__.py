"""Upscale models, under the name custom nodes import."""
