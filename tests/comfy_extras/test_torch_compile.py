"""The node that compiles a model: it acts on its view alone, through one wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy import progress
from comfy.nn.wrappers import run_wrapped
from comfy.patching.patcher import ModelPatcher
from comfy_extras.nodes_torch_compile import TorchCompileModel, set_torch_compile_wrapper

CPU = torch.device("cpu")


class Base(nn.Module):
    """Applies its network through wrappers, as base models do."""

    def __init__(self) -> None:
        super().__init__()
        self.diffusion_model = nn.Sequential(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
        self.requires_grad_(False)

    def apply_model(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        return run_wrapped(self._apply, self, "apply_model", options, x, transformer_options={})

    def _apply(self, x: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        del transformer_options
        for layer in self.diffusion_model[0].children():
            x = layer(x)
        return x


def wrappers(patcher: Any) -> dict[str, Any]:
    return {"wrappers": patcher.wrappers}


def test_the_view_runs_compiled_and_the_model_it_came_from_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = ModelPatcher(Base(), load_device=CPU, offload_device=CPU)
    view: Any = TorchCompileModel.execute(plain, "inductor").result[0]
    assert view is not plain
    assert view.model is plain.model
    assert not plain.wrappers.get("apply_model")
    assert len(view.wrappers["apply_model"]["torch.compile"]) == 1

    torch._dynamo.reset()
    compiled = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        del inputs
        compiled.append(graph)
        return graph.forward

    for _ in range(2):  # a later call replaces the former
        set_torch_compile_wrapper(view, backend)  # type: ignore[arg-type]
    assert len(view.wrappers["apply_model"]["torch.compile"]) == 1
    x = torch.randn(3, 4)
    shown: list[str] = []
    monkeypatch.setattr(progress, "NOTE_HOOK", shown.append)
    ours = view.model.apply_model(x, wrappers(view))
    assert len(compiled) == 1
    assert len(shown) == 1
    assert shown[0].startswith("compiling 2 blocks: the first run takes")
    torch.testing.assert_close(ours, plain.model.apply_model(x, {}))
    assert len(compiled) == 1
