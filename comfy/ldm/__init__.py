"""Networks only: a configuration in, tensors in, tensors out. One package per architecture."""
