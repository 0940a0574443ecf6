"""Flux and its successors: a transformer over text and picture patches together."""
