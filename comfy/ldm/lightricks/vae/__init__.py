"""Autoencoders of LTX video, in modules of the names that custom nodes import."""
