"""The network of AuraFlow."""
