"""Weights of few bits: how blocks of numbers are stored, and the files that hold them."""
