"""Compiles a network before it is sampled."""

from __future__ import annotations

from typing import Any

from comfy.nn.compilation import RegionalCompiler
from comfy.patching.wrappers import WrappersMP
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

WRAPPER_KEY = "torch.compile"


class CompiledNetwork:
    """A wrapper of kind "apply_model" during which the network's blocks run compiled.

    They share their weights with the plain ones, so patches and offloading go on working.
    """

    def __init__(self, **options: Any) -> None:
        self.compiler = RegionalCompiler(**options)

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        with self.compiler.applied(executor.class_obj.diffusion_model, _run_options(args, kwargs)):
            return executor(*args, **kwargs)


def _run_options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The transformer options of a call of apply_model."""
    given = kwargs.get("transformer_options", args[5] if len(args) > 5 else None)
    return given or {}


def set_torch_compile_wrapper(model: Any, backend: str, **options: Any) -> None:
    """Have a model's network compiled; a later call replaces the former."""
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, WRAPPER_KEY)
    wrapper = CompiledNetwork(backend=backend, **options)
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, WRAPPER_KEY, wrapper)


class TorchCompileModel(io.ComfyNode):
    """Compiles the network's blocks: slow once, faster after, for all sizes."""

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
