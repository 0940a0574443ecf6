"""DINOv2."""
