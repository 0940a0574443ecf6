"""Networks compiled block by block: shared code, open sizes, exact results, visible failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy import interrupt, ops, progress
from comfy.devices import residency
from comfy.ldm.unet.blocks import ResBlock
from comfy.ldm.unet.model import UNetModel
from comfy.ldm.unet.transformer import BasicTransformerBlock
from comfy.nn import compilation
from comfy.nn.compilation import RegionalCompiler, regions
from comfy.ops.encoded import EncodedWeight
from comfy.patching.patcher import ModelPatcher
from comfy.weights.adapters import LoRAAdapter
from comfy.weights.assign import assign_weights
from comfy.weights.state_dict import load_torch_file
from tests.support import gguf_files


class Block(nn.Module):
    """A block of two layers that reads its options."""

    compiles_alone = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = ops.disable_weight_init.Linear(width, width)
        self.second = ops.disable_weight_init.Linear(width, width)

    def forward(self, x: Tensor, transformer_options: dict[str, Any] | None = None) -> Tensor:
        for patch in (transformer_options or {}).get("patches", {}).get("block", ()):
            x = patch(x)
        return x + self.second(torch.tanh(self.first(x)))


class Network(nn.Module):
    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.requires_grad_(False)

    def forward(self, x: Tensor, options: dict[str, Any] | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, transformer_options=options)
        return x


@pytest.fixture
def graphs() -> list[Any]:
    """What a counting back end was given to compile."""
    torch._dynamo.reset()
    return []


@pytest.fixture
def compiler(graphs: list[Any]) -> RegionalCompiler:
    def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        del inputs
        graphs.append(graph)
        return graph.forward

    return RegionalCompiler(backend=backend)


def compiled(
    compiler: RegionalCompiler, network: nn.Module, x: Tensor, options: Any = None
) -> Tensor:
    """The network's result in a context as prompts run in: inference mode from end to end."""
    with compiler.applied(network, options), torch.inference_mode():
        size, stride = x.shape, x.stride()
        return network(x.clone().as_strided(size, stride), options)


def test_blocks_of_a_kind_and_all_sizes_share_code(
    compiler: RegionalCompiler, graphs: list[Any]
) -> None:
    network = Network()
    for shape in ((2, 5, 4), (2, 9, 4), (7, 3, 4), (4, 4, 4)):
        x = torch.randn(shape)
        assert torch.equal(compiled(compiler, network, x), network(x))
    assert len(graphs) == 1
    for tokens in (5, 8):  # a single item is a kind of its own, whatever its stride along the batch
        x = torch.randn(1, tokens, 4).as_strided((1, tokens, 4), (tokens, 4, 1))
        assert torch.equal(compiled(compiler, network, x), network(x))
    assert len(graphs) == 2


def test_changing_facts_in_the_options_compile_nothing_anew(
    compiler: RegionalCompiler, graphs: list[Any]
) -> None:
    network, x = Network(), torch.randn(2, 3, 4)
    for number in range(3):
        compiled(compiler, network, x, {"step": number, f"fact {number}": object()})
    assert len(graphs) == 1


def test_weights_that_are_patched_in_place_or_replaced_are_used(
    compiler: RegionalCompiler, graphs: list[Any]
) -> None:
    network, x = Network(), torch.randn(2, 3, 4)
    compiled(compiler, network, x)
    network.blocks[0].first.weight.add_(1)
    network.blocks[1].second.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    assert torch.equal(compiled(compiler, network, x), network(x))
    assert len(graphs) == 1


def test_streamed_and_patched_layers_run_as_they_are(
    compiler: RegionalCompiler, graphs: list[Any]
) -> None:
    network, x = Network(depth=1), torch.randn(2, 3, 4)
    network.blocks[0].first.comfy_cast_weights = True
    network.blocks[0].first.weight_function = [lambda weight: weight * 3]
    assert torch.equal(compiled(compiler, network, x), network(x))
    assert not graphs
    network.blocks[0].first.weight_function = []
    assert torch.equal(compiled(compiler, network, x), network(x))
    assert len(graphs) == 1


def test_blocks_that_leave_the_device_and_come_back_between_calls_give_the_same(
    accelerator: Any, compiler: RegionalCompiler, graphs: list[Any]
) -> None:
    """Also those of a view with a LoRA, and with half of the weights away."""
    device = torch.device(accelerator.NAME, 0)
    plain = ModelPatcher(Network(64, 4), load_device=device, offload_device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(6)
    changes = {
        key: ("diff", (torch.randn(weight.shape, generator=generator),))
        for key, weight in plain.model_state_dict().items()
    }
    changed = plain.clone()
    changed.add_patches(changes, 0.01)
    size, x = plain.model_size(), torch.randn(2, 3, 64, generator=generator).to(device)
    network: Any = plain.model
    told, seen = [], []
    for view in (plain, changed, plain):
        residency.load_models_gpu([view], force_full_load=True)
        seen.append(expected := network(x))
        for away in (0, size // 2, -size // 2, size):
            if away > 0:
                assert view.partially_unload(view.offload_device, away) > 0
            elif away < 0:
                view.partially_load(device, size)
            assert torch.equal(compiled(compiler, network, x), expected)
            told.append(len(graphs))
    assert told == [1] * 12
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


def coded(network: nn.Module, folder: Path) -> nn.Module:
    """A network with its matrices in blocks of few bits."""
    own = {key: value.clone() for key, value in network.state_dict().items()}
    assign_weights(network, load_torch_file(gguf_files.write(folder / "x.gguf", own, "Q8_0")))
    assert all(isinstance(block.first, EncodedWeight) for block in network.blocks)
    return network


def test_blocks_of_coded_weights_share_code(
    compiler: RegionalCompiler, graphs: list[Any], tmp_path: Path
) -> None:
    network = coded(Network(64), tmp_path)
    for shape in ((2, 5, 64), (2, 9, 64)):
        x = torch.randn(shape)
        assert torch.equal(compiled(compiler, network, x), network(x))
    assert len(graphs) == 1


def test_a_whole_network_of_coded_weights_is_compiled_with_its_loras(tmp_path: Path) -> None:
    """As packs do it."""
    torch._dynamo.reset()
    network, x = coded(Network(64, 2), tmp_path), torch.randn(2, 64)
    view = ModelPatcher(network, torch.device("cpu"), torch.device("cpu"))
    up, down = torch.ones(64, 1), torch.ones(1, 64)
    adapter = LoRAAdapter(set(), (up, down, None, None, None, None))
    view.add_patches({"blocks.0.first.weight": adapter, "blocks.1.second.weight": adapter}, 0.01)
    whole = torch.compile(network, backend="eager", fullgraph=True)
    bare = network(x)
    view.patch_model(torch.device("cpu"))
    expected = network(x)
    assert not torch.allclose(expected, bare)
    assert torch.equal(whole(x), expected)
    assert torch.equal(whole(x), expected)
    view.unpatch_model()
    assert torch.equal(whole(x), bare)


def test_blocks_that_run_as_they_are_are_told_when_their_number_changes(
    compiler: RegionalCompiler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(progress, "NOTE_HOOK", shown.append)
    network, x = Network(depth=2), torch.randn(2, 3, 4)
    layers = [block.first for block in network.blocks]
    with caplog.at_level(logging.INFO, logger=compilation.__name__):
        for streamed in (0, 1, 1, 2, 2, 0):
            for number, layer in enumerate(layers):
                layer.comfy_cast_weights = number < streamed
                layer.weight_function = [lambda weight: weight] * (number < streamed)
            assert torch.equal(compiled(compiler, network, x), network(x))
    told = [record.getMessage() for record in caplog.records if "blocks run" in record.message]
    assert [line.split(" run")[0] for line in told] == [
        "1 of 2 blocks", "2 of 2 blocks", "all 2 blocks",
    ]  # fmt: skip
    assert [note.split(" run")[0] for note in shown[1:]] == ["2 of 2 blocks"]


def test_custom_patches_and_replaced_blocks_run_as_they_are(
    compiler: RegionalCompiler, graphs: list[Any]
) -> None:
    network, x = Network(), torch.randn(2, 3, 4)
    options = {"patches": {"block": [lambda x: x * 2]}}
    assert torch.equal(compiled(compiler, network, x, options), network(x, options))
    for block in network.blocks:
        block.forward = lambda x, transformer_options: x * 4
    assert torch.equal(compiled(compiler, network, x), x * 64)
    assert not graphs
    assert "forward" in vars(network.blocks[0])


def test_the_network_is_as_before_after_an_error(compiler: RegionalCompiler) -> None:
    network = Network()
    keys = list(network.state_dict())
    with pytest.raises(RuntimeError), compiler.applied(network):
        network(torch.randn(2, 3, 5))
    assert all("forward" not in vars(block) for block in network.blocks)
    assert list(network.state_dict()) == keys


def test_a_cancellation_is_noticed_between_blocks(compiler: RegionalCompiler) -> None:
    network, x = Network(), torch.randn(2, 3, 4)
    compiled(compiler, network, x)
    interrupt.interrupt_current_processing()
    with pytest.raises(interrupt.InterruptProcessingException):
        compiled(compiler, network, x)


def test_a_failing_compiler_is_said_once_and_the_network_runs(
    graphs: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    del graphs
    shown: list[str] = []
    monkeypatch.setattr(progress, "NOTE_HOOK", shown.append)

    def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        raise RuntimeError("no compiler here")

    compiler = RegionalCompiler(backend=backend)
    network, x = Network(), torch.randn(2, 3, 4)
    with caplog.at_level(logging.WARNING, logger=compilation.__name__):
        for _ in range(2):
            assert torch.equal(compiled(compiler, network, x), network(x))
    assert len(caplog.records) == 1
    assert "runs uncompiled" in caplog.text
    assert "no compiler here" in caplog.text
    assert len(shown) == 2  # that it compiles, and that it failed
    assert "no compiler here" in shown[1]


SIZES: Any = {
    "in_channels": 4, "out_channels": 4, "model_channels": 8, "num_res_blocks": [1],
    "channel_mult": [1], "transformer_depth": [1], "transformer_depth_output": [1, 1],
    "transformer_depth_middle": 1, "context_dim": 8, "num_heads": 2, "norm_num_groups": 4,
}  # fmt: skip


def test_regions_are_the_outermost_marked_blocks_else_repeated_ones_else_the_whole() -> None:
    kinds = {type(block) for block in regions(UNetModel(**SIZES, device="meta"))}
    assert kinds == {ResBlock, BasicTransformerBlock}
    plain = nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), nn.ReLU())
    assert regions(plain) == list(plain[0].children())
    assert regions(nn.Linear(2, 2))[0].__class__ is nn.Linear


def test_a_unet_gives_the_same_compiled(compiler: RegionalCompiler, graphs: list[Any]) -> None:
    network = UNetModel(**SIZES).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for parameter in network.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    for height, tokens in ((8, 7), (12, 77)):
        x, context = torch.randn(2, 4, height, 8), torch.randn(2, tokens, 8)
        times = torch.tensor([3.0, 3.0])
        with compiler.applied(network, {}), torch.inference_mode():
            ours = network(
                x.clone(), times, context, transformer_options={"block": ("input", height)}
            )
        torch.testing.assert_close(ours, network(x, times, context))
    assert len(graphs) == 3  # residual blocks of two widths, one transformer
