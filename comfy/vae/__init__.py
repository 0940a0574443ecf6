"""Autoencoders as nodes use them: the VAE class, and the table of kinds it recognises."""
