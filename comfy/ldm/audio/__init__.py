"""Networks over sound: the transformer of Stable Audio and its autoencoder."""
