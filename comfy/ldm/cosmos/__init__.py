"""The networks of Cosmos 1 and Cosmos Predict 2, and the autoencoder of Cosmos 1."""
