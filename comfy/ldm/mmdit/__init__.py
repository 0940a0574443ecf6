"""MMDiT, the transformer of Stable Diffusion 3 and 3.5."""
