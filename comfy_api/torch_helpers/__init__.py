"""Helpers for nodes that compile models."""

from comfy_api.torch_helpers.torch_compile import set_torch_compile_wrapper

__all__ = ["set_torch_compile_wrapper"]
