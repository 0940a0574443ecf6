"""The network of Hunyuan-DiT."""
