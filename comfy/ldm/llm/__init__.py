"""Decoder language models that are used as text encoders."""
