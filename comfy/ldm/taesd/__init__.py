"""TAESD: a tiny autoencoder for previews."""
