"""Numerics of the server: networks, weights, patching, sampling. Torch lives here."""
