"""Sound for nodes: reading, resampling, saving, editing, latents."""
