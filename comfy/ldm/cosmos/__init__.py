"""The network of Cosmos Predict 2."""
