"""Accelerators, precision policy, memory accounting and residency of loaded models."""
