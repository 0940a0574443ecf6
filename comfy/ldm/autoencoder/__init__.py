"""The KL autoencoder of Stable Diffusion and its successors."""
