"""The network of HiDream."""
