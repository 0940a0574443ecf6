"""The network of Mochi and its autoencoder."""
