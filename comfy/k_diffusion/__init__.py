"""Solvers, under the package name custom nodes import."""
