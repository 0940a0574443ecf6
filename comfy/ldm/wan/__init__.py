"""Networks of Wan: video transformers and their causal autoencoders."""
