"""The text and image towers of CLIP."""
