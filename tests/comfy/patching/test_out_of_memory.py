"""A full device at any point of encoding, sampling and decoding: room is made, the result stays."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import comfy.sample
from comfy import loading
from comfy.devices import residency
from comfy.patching.patcher import ModelPatcher
from tests.support import tiny_checkpoint
from tests.support.accelerator import CPU, Network

CONDITION = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(1))
LATENT = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(2))
PICTURE = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(3))
POINTS = (0, 5, 20, 45, 60, 90, 130, 200, 218, 260)
"""Which allocation fails, counted from the beginning of the call: loading, networks, the rest."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("full") / "tiny.safetensors")


def sampled(model: Any) -> Tensor:
    latent = torch.zeros(1, 4, 8, 8)
    return comfy.sample.sample(
        model, LATENT, 1, 4.0, "euler", "normal", [[CONDITION, {}]], [[CONDITION * 0.5, {}]],
        latent, disable_pbar=True, seed=3,
    )  # fmt: skip


CALLS: dict[str, Callable[[Any], Tensor]] = {
    "encode a text": lambda found: found.clip.encode("a cat on a mat"),
    "sample": lambda found: sampled(found.model),
    "decode": lambda found: found.vae.decode(LATENT),
    "encode": lambda found: found.vae.encode(PICTURE),
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_one_failed_allocation_changes_no_result(
    checkpoint: Path, accelerator: Any, name: str, inference: bool
) -> None:
    found, call = loading.load_checkpoint_guess_config(str(checkpoint)), CALLS[name]
    with torch.inference_mode() if inference else nullcontext():
        want = call(found)
        for point in POINTS:
            residency.unload_all_models()
            accelerator.fail_allocation(point, 1)
            torch.testing.assert_close(call(found), want, rtol=1e-4, atol=1e-4)
            accelerator.fail_allocation(-1)
    residency.unload_all_models()
    gc.collect()
    assert torch.accelerator.memory_allocated(0) == 0


@pytest.mark.parametrize("name", CALLS)
def test_a_device_that_stays_full_is_reported_with_who_holds_what(
    checkpoint: Path, accelerator: Any, name: str
) -> None:
    found = loading.load_checkpoint_guess_config(str(checkpoint))
    accelerator.fail_allocation(20, 1000)
    with pytest.raises(residency.OutOfMemoryReport, match=r"MiB free; (wanted|held by): "):
        CALLS[name](found)
    accelerator.fail_allocation(-1)
    assert CALLS[name](found).isfinite().all()


def test_every_model_of_a_run_gives_room(accelerator: Any) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    small, large = ModelPatcher(Network(8), device, CPU), ModelPatcher(Network(64), device, CPU)
    residency.load_models_gpu([small, large])
    attempts = []

    def call() -> int:
        attempts.append(large.loaded_size())
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("full")
        return len(attempts)

    assert residency.run_or_make_room(small, call) == 2
    assert attempts[1] <= attempts[0] // 2
