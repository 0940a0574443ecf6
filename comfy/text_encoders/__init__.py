"""Text encoders: tokenizers, networks, prompt weighting and the CLIP class that joins them."""
