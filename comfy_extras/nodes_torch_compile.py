"""Compiles a network before it is sampled."""

from __future__ import annotations

from typing import Any

import torch

from comfy.patching.wrappers import WrappersMP
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

WRAPPER_KEY = "torch.compile"


class CompiledNetwork:
    """A wrapper of kind "apply_model" that calls a compiled network in place of the plain one.

    The compiled module shares its weights with the plain one, so patches and offloading go on
    working; it is made at the first call.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self._compiled: tuple[Any, Any] | None = None

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        model = executor.class_obj
        plain = model.diffusion_model
        if self._compiled is None or self._compiled[0] is not plain:
            self._compiled = (plain, torch.compile(model=plain, **self.options))
        model._modules["diffusion_model"] = self._compiled[1]
        try:
            return executor(*args, **kwargs)
        finally:
            model._modules["diffusion_model"] = plain


def set_torch_compile_wrapper(model: Any, backend: str, **options: Any) -> None:
    """Have a model's network compiled; a later call replaces the former."""
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, WRAPPER_KEY)
    wrapper = CompiledNetwork({"backend": backend, **options})
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, WRAPPER_KEY, wrapper)


class TorchCompileModel(io.ComfyNode):
    """Compiles the network: slow once, faster after, for runs of one size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TorchCompileModel",
            category="_for_testing",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input("backend", options=["inductor", "cudagraphs"]),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, backend: str) -> io.NodeOutput:
        view = model.clone()
        set_torch_compile_wrapper(view, backend)
        return io.NodeOutput(view)

    patch = execute


comfy_entrypoint = entrypoint_of(TorchCompileModel)
