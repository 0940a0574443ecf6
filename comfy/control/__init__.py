"""Control networks as nodes use them: chained, with strength and range, beside the diffusion
model."""
