"""The public place of solvers that are not in `comfy.k_diffusion`."""
