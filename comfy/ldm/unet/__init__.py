"""The UNet of Stable Diffusion 1.x, 2.x, SDXL and SVD, and the ControlNets made from it."""
