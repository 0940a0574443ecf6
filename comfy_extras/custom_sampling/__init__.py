"""The custom-sampler nodes by what they make: noise levels, samplers, guiders, noise, a run."""
