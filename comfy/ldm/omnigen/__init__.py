"""The network of OmniGen 2."""
