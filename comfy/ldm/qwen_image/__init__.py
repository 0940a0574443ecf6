"""The network of Qwen-Image."""
