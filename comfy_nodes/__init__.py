"""Built-in nodes by category. Each module ends with the two mappings the node table is made of."""
