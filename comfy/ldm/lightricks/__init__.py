"""LTX video: how its latents become tokens."""
