"""Public names of the preview autoencoder."""
