"""Calls of the model chosen by the memory that a device has, with networks and patchers as users
have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfy import loading
from comfy.devices import residency
from comfy.sampling import run, samplers
from tests.support import tiny_checkpoint

MIB = 1 << 20
# An item is estimated at 31 MiB; the least holds the weights, the most all items that fit together.
CAPACITIES = [6 * MIB, 120 * MIB, 4096 * MIB]
SIGMAS = torch.tensor([8.0, 2.0, 0.0])


def text(tokens: int, seed: int, **options: Any) -> list[Any]:
    values = torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(seed))
    return [values, options]


def lists() -> tuple[list[Any], list[Any]]:
    """Whole pictures, areas, masks and ranges; texts of several lengths."""
    mask = torch.rand(1, 192, 256, generator=torch.Generator().manual_seed(3))
    positive = [
        text(77, 1), text(154, 2, strength=0.7), text(77, 3, mask=mask, mask_strength=0.8),
        text(77, 4, area=(12, 16, 4, 8), strength=1.5), text(77, 5, area=(12, 16, 8, 0)),
        text(77, 6, start_percent=0.0, end_percent=0.6),
    ]  # fmt: skip
    return positive, [text(77, 7), text(77, 8, mask=1 - mask)]


@torch.inference_mode()
def sampled(model: Any) -> tuple[Tensor, list[int]]:
    """The end of a run, and how many items each call took."""
    taken: list[int] = []

    def count(apply: Any, given: dict[str, Any]) -> Tensor:
        taken.append(given["input"].shape[0])
        return apply(given["input"], given["timestep"], **given["c"])  # type: ignore[no-any-return]

    counted = model.clone()
    counted.set_model_unet_function_wrapper(count)
    noise = torch.randn(1, 4, 24, 32, generator=torch.Generator().manual_seed(0))
    made = run.sample_custom(
        counted, noise, 3.0, samplers.ksampler("euler"), SIGMAS, *lists(),
        torch.zeros_like(noise), disable_pbar=True, seed=0,
    )  # fmt: skip
    return made.cpu(), taken


def test_more_memory_makes_fewer_calls_and_the_same_picture(
    accelerator: Any, tmp_path: Path
) -> None:
    path = tiny_checkpoint.write(tmp_path / "tiny.safetensors")
    found: list[tuple[Tensor, list[int]]] = []
    for capacity in CAPACITIES:
        accelerator.set_capacity(capacity)
        model = loading.load_checkpoint_guess_config(
            str(path), False, False, model_options={"dtype": torch.float32}
        ).model
        found.append(sampled(model))
        residency.unload_all_models()
        del model
    calls = [len(taken) for _, taken in found]
    items = [sum(taken) for _, taken in found]
    assert calls == sorted(calls, reverse=True), calls
    assert len(set(calls)) == len(calls), calls
    assert max(found[0][1]) == 1
    assert len(set(items)) == 1
    for made, _ in found[:-1]:
        torch.testing.assert_close(made, found[-1][0], rtol=0, atol=1e-4 * float(made.std()))
