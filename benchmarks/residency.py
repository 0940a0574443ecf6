"""Speed and memory of loading, patching and switching models; prints its figures.

    python benchmarks/residency.py [--quick] [--part NAME]

Everything runs on the CPU, or for device budgets on the simulated accelerator of the test suite
(left out without a C++ compiler). Figures of merit: see the header printed with each part.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
from safetensors.torch import save_file
from torch import nn

from comfy import ops
from comfy.devices import residency
from comfy.ldm.unet.model import UNetModel
from comfy.patching.patcher import ModelPatcher
from comfy.weights.adapters import LoRAAdapter
from comfy.weights.assign import assign_weights
from comfy.weights.state_dict import load_torch_file

CPU = torch.device("cpu")
MIB = 2**20
ROUNDS = 5  # of a measurement whose median counts
SDXL_UNET: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "transformer_depth_middle": 10,
    "context_dim": 2048,
    "num_head_channels": 64,
    "use_linear_in_transformer": True,
    "adm_in_channels": 2816,
    "num_classes": "sequential",
}
PARTS = ("load", "patch", "switch", "clone", "flatness", "budget")


class Blocks(nn.Module):
    """Linear layers of a transformer's proportions."""

    def __init__(self, width: int, count: int, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        options = {"dtype": dtype, "device": device, "bias": False}
        linear = ops.manual_cast.Linear
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    **{n: linear(width, width, **options) for n in ("q", "k", "v", "out")},
                    "up": linear(width, 4 * width, **options),
                    "down": linear(4 * width, width, **options),
                }
            )
            for _ in range(count)
        )
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L, D] to the same; cheap on purpose."""
        for block in self.blocks:
            x = x + block["out"](block["v"](x) + block["q"](x) + block["k"](x))
            x = x + block["down"](block["up"](x))
        return x


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def best(call: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def lora_for(model: nn.Module, rank: int, seed: int = 0) -> dict[str, LoRAAdapter]:
    """A LoRA on every layer."""
    generator = torch.Generator().manual_seed(seed)
    patches = {}
    for key, weight in model.state_dict().items():
        ones = (1,) * (weight.ndim - 2)
        up = torch.randn(weight.shape[0], rank, *ones, generator=generator) * 0.01
        down = torch.randn(rank, *weight.shape[1:], generator=generator) * 0.01
        patches[key] = LoRAAdapter(set(), (up, down, float(rank), None, None, None))
    return patches


def bench_load(folder: Path, width: int, count: int) -> None:
    """Cold load: file to network, against plain copies of as many bytes into new memory."""
    print("cold load of a page-cached file (goal: at least 70 % of a memory copy's rate)")
    path = folder / "net.safetensors"
    model = Blocks(width, count, torch.float16)
    for parameter in model.parameters():
        parameter.data.normal_()
    save_file(model.state_dict(), path)
    size = path.stat().st_size
    plain = [p.detach().clone() for p in model.parameters()]
    del model
    gc.collect()

    def load(dtype: torch.dtype) -> Blocks:
        net = Blocks(width, count, dtype, "meta")
        assign_weights(net, load_torch_file(path), consume=True)
        return net

    def copied(tensors: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        return [t.detach().to(dtype, copy=True) for t in tensors]

    half, single = torch.float16, torch.float32
    copy_s = best(lambda: copied(plain, half), 5)
    map_s = best(lambda: load(half), 5)
    use_s = best(lambda: copied(load(half).parameters(), half), 5)
    print(
        f"  same type: {size / MIB:.0f} MiB mapped in {map_s * 1e3:.1f} ms; loaded and copied out "
        f"in {use_s * 1e3:.0f} ms, plain copy {copy_s * 1e3:.0f} ms "
        f"({copy_s / use_s * 100:.0f} % of a copy's rate)"
    )
    wide = copied(plain, single)
    wide_s = best(lambda wide=wide: copied(wide, single), 5)
    wide.clear()
    load_s = best(lambda: load(single), 5)
    before = resident_bytes()
    net = load(single)
    held = resident_bytes() - before
    weights = sum(p.nbytes for p in net.parameters())
    print(
        f"  to float32: {load_s * 1e3:.0f} ms ({copy_s / load_s * 100:.0f} % of the rate of "
        f"copying the file's bytes, {wide_s / load_s * 100:.0f} % of copying the weights' "
        f"{weights / MIB:.0f} MiB); resident +{held / MIB:.0f} MiB"
    )


class Layers(nn.Module):
    """The linear layers and convolutions of SDXL's UNet, every `one_in`-th of them."""

    def __init__(self, one_in: int, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        whole = UNetModel(**SDXL_UNET, device="meta").state_dict()
        shapes = [w.shape for key, w in whole.items() if key.endswith("weight") and w.ndim > 1]
        options = {"dtype": dtype, "device": device, "bias": False}
        self.layers = nn.ModuleList(
            ops.manual_cast.Linear(shape[1], shape[0], **options)
            if len(shape) == 2
            else ops.manual_cast.Conv2d(shape[1], shape[0], shape[2], **options)
            for shape in shapes[::one_in]
        )
        self.requires_grad_(False)


def layers_from_file(one_in: int, folder: Path, stored: torch.dtype) -> Layers:
    """Layers in float32 from a file: of float16, as checkpoints are, or of float32, in place."""
    made = Layers(one_in, stored)
    for parameter in made.parameters():
        parameter.data.normal_()
    save_file(made.state_dict(), folder / "layers.safetensors")
    del made, parameter
    model = Layers(one_in, torch.float32, "meta")
    assign_weights(model, load_torch_file(folder / "layers.safetensors"), consume=True)
    return model


def layers_in_memory(one_in: int, dtype: torch.dtype) -> Layers:
    """Layers that came from no file."""
    model = Layers(one_in, dtype)
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


def plain_products(one_in: int, rank: int) -> None:
    """The products as plain calls, for a process that does nothing else and keeps no memory."""
    shapes = [
        weight.shape for weight in Layers(one_in, torch.float32, "meta").state_dict().values()
    ]
    factors = [(torch.randn(s[0], rank), torch.randn(rank, s[1:].numel())) for s in shapes]
    let_go = [
        best(lambda: [None for one in factors if torch.mm(*one) is None], 1) for _ in range(5)
    ]
    kept = [best(lambda: [torch.mm(*one) for one in factors], 1) for _ in range(5)]
    print("  the products in a process of their own:")
    for name, seconds in (("let go", let_go), ("kept", kept)):
        print(f"    {name}: {min(seconds):.3f}, {sorted(seconds)[2]:.3f} s", flush=True)


def bench_patch(one_in: int, rank: int, folder: Path) -> None:
    """Patching and changing to another LoRA and back, against the matrix products alone."""
    print(
        f"patching one in {one_in} of SDXL's weights with a LoRA of rank {rank}, "
        f"{torch.get_num_threads()} threads (goal: within 1.3 x of the matrix products alone; "
        "fastest and median seconds and ratio of the medians to plain products; seconds of the "
        "processor, which other work disturbs less where there is one thread, and their ratio)",
        flush=True,
    )
    subprocess.run([sys.executable, __file__, "--products", str(one_in), str(rank)], check=True)
    cases: dict[str, Callable[[], Layers]] = {
        "float32, converted from a float16 file": lambda: layers_from_file(
            one_in, folder, torch.float16
        ),
        "float32, as its file has it": lambda: layers_from_file(one_in, folder, torch.float32),
        "float32 that came from no file": lambda: layers_in_memory(one_in, torch.float32),
        "float16 that came from no file": lambda: layers_in_memory(one_in, torch.float16),
    }
    for name, make in cases.items():
        patch_in_turns(name, make(), rank)
        gc.collect()


def patch_in_turns(name: str, model: Layers, rank: int) -> None:
    """Measure one model; what is measured never holds its weights, which would change the way."""
    views = [ModelPatcher(model, CPU, CPU) for _ in range(2)]
    for number, view in enumerate(views):
        view.add_patches(lora_for(model, rank, number))
    factors = [patch[0][1].weights[:2] for patch in views[0].patches.values()]
    factors = [(up.flatten(1), down.flatten(1)) for up, down in factors]
    at_hand = [torch.zeros(up.shape[0], down.shape[1]) for up, down in factors]
    calls: dict[str, Callable[[], Any]] = {
        "products": lambda: [None for up, down in factors if torch.mm(up, down) is None],
        "products into memory at hand": lambda: [
            torch.mm(up, down, out=out) for (up, down), out in zip(factors, at_hand)
        ],
        "products into new memory": lambda: [torch.mm(up, down) for up, down in factors],
        "copying the weights": lambda: [one.detach().clone() for one in model.parameters()],
        "first patch": lambda: views[0].patch_model(CPU),
        "to another LoRA": lambda: views[1].patch_model(CPU),
        "and back": lambda: views[0].patch_model(CPU),
        "taking it off": lambda: views[0].unpatch_model(),
    }
    seconds: dict[str, list[float]] = {call: [] for call in calls}
    busy: dict[str, list[float]] = {call: [] for call in calls}
    patching = [calls[call] for call in ("first patch", "to another LoRA", "and back")]
    before = added = 0
    for _ in range(ROUNDS):
        for call, function in calls.items():
            if call == "first patch":
                before = resident_bytes()
            before_busy = time.process_time()
            seconds[call].append(best(function, 1))
            busy[call].append(time.process_time() - before_busy)
            if function in patching:
                added = max(added, resident_bytes() - before)
    medians = {call: sorted(measured)[ROUNDS // 2] for call, measured in seconds.items()}
    size = sum(w.nbytes for w in model.parameters()) / MIB
    print(f"  {name}, {len(factors)} weights of {size:.0f} MiB; resident +{added / MIB:.0f} MiB:")
    for call, median in medians.items():
        ratio = median / medians["products"]
        busy_ratio = min(busy[call]) / min(busy["products"])
        print(
            f"    {call}: {min(seconds[call]):.3f}, {median:.3f} s ({ratio:.2f} x); "
            f"processor {min(busy[call]):.3f} s ({busy_ratio:.2f} x)"
        )


def bench_switch(width: int, count: int) -> None:
    """Switching between two variants of one loaded model."""
    print("switching between two LoRA variants (goal: patched weights only, both ways alike)")
    model = Blocks(width, count, torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_()
    base = ModelPatcher(model, CPU, CPU)
    views = [base.clone(), base.clone()]
    for number, view in enumerate(views):
        view.add_patches(dict(list(lora_for(model, 8, number).items())[: 6 * (number + 1)]))
    seconds: list[list[float]] = [[], []]
    for number in [0, 1] * 6:
        view = views[number]
        seconds[number].append(best(lambda v=view: residency.load_models_gpu([v]), 1))
    for view, measured in zip(views, seconds):
        ordered = sorted(measured[1:])  # the first one also loads
        print(
            f"  to a view with {len(view.patches)} patched weights: {ordered[0] * 1e3:.1f} ms, "
            f"median {ordered[len(ordered) // 2] * 1e3:.1f} ms"
        )
    residency.unload_all_models()


def bench_clone() -> None:
    """Cloning a patcher with a thousand patched weights."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(1000))
    patcher = ModelPatcher(model, CPU, CPU)
    patcher.add_patches({f"layers.{i}.weight": (torch.ones(1, 1),) for i in range(1000)})
    patcher.model_size()
    print(f"clone with 1,000 patched keys: {best(patcher.clone, 20) * 1e3:.2f} ms (goal: 1 ms)")


def bench_flatness(rounds: int) -> None:
    """Resident memory over runs that alternate models and LoRAs."""
    nets = [Blocks(256, 4, torch.float32), Blocks(320, 4, torch.float32)]
    patchers = [ModelPatcher(net, CPU, CPU) for net in nets]
    marks = []
    for number in range(rounds):
        base = patchers[number % 2]
        view = base.clone()
        view.add_patches(lora_for(base.model, 4, number % 5))
        residency.load_models_gpu([view])
        base.model(torch.ones(1, 4, base.model.blocks[0]["q"].in_features))
        if number in (rounds // 5, rounds - 1):
            gc.collect()
            marks.append(resident_bytes())
    growth = (marks[1] - marks[0]) / marks[0] * 100
    print(f"resident memory over {rounds} alternating runs: {growth:+.2f} % (goal: within 3 %)")
    residency.unload_all_models()


def bench_budget(width: int, count: int) -> None:
    """A model twice the device's budget, and a loop of three models of which two fit."""
    from tests.support.accelerator import simulated_accelerator

    with simulated_accelerator() as fakegpu:
        device = torch.device(f"{fakegpu.NAME}:0")
        model = Blocks(width, count, torch.float32)
        size = sum(p.nbytes for p in model.parameters())
        patcher = ModelPatcher(model, device, CPU)
        fakegpu.set_async(True)
        patcher.patch_model(device, size // 2)
        x = torch.ones(1, 4, width, device=device)
        with torch.inference_mode():
            model(x)
            with fakegpu.transfers() as moved:
                model(x)
        streamed = size - patcher.loaded_size()
        print(
            f"model at half residency: {moved['h2d_bytes'] / MIB:.1f} MiB moved per step, "
            f"{streamed / MIB:.1f} MiB not resident (goal: no more than that)"
        )
        patcher.detach()
        trio = [ModelPatcher(Blocks(width, count, torch.float32), device, CPU) for _ in range(3)]
        fakegpu.set_capacity(int(2.05 * size / 0.9))
        for patcher in trio * 3:
            residency.load_models_gpu([patcher])
        with fakegpu.transfers() as moved:
            for patcher in trio * 5:
                residency.load_models_gpu([patcher])
        loads = moved["h2d_bytes"] / size / 5
        print(f"loop of three models, two fit: {loads:.2f} loads a round (all: 3, least: 1.5)")


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part")
    parser.add_argument("--one-in", type=int, help="patch: take one in so many of SDXL's weights")
    parser.add_argument("--products", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.products:
        plain_products(*arguments.products)
        return
    quick = arguments.quick
    width, count = (512, 4) if quick else (1280, 12)
    parts: dict[str, Callable[[], None]] = {
        "load": lambda: bench_load(Path(folder), width, count),
        "patch": lambda: bench_patch(arguments.one_in or (32 if quick else 8), 32, Path(folder)),
        "switch": lambda: bench_switch(width, count),
        "clone": bench_clone,
        "flatness": lambda: bench_flatness(50 if quick else 200),
        "budget": lambda: bench_budget(256, 6),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.part or PARTS:
            parts[name]()


if __name__ == "__main__":
    main()
