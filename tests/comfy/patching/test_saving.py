"""Saving writes the weights as their patches make them, also where the device is too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import comfy.sd
from comfy.devices import residency
from comfy.model_patcher import ModelPatcher, ModelPatcherDynamic
from comfy.weights.state_dict import load_torch_file
from tests.support import tiny_checkpoint
from tests.support.accelerator import assert_untouched, snapshot

KEY = "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.weight"


@pytest.mark.parametrize("share", [4, 0.5], ids=["larger", "smaller"])
@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
def test_a_patched_model_is_saved_whatever_the_size_of_the_device(
    accelerator: Any, tmp_path: Path, kind: type[ModelPatcher], share: float
) -> None:
    path = tiny_checkpoint.write(tmp_path / "tiny.safetensors")
    model = comfy.sd.load_checkpoint_guess_config(str(path), output_vae=False, output_clip=False)[0]
    view = kind(model.model, model.load_device, model.offload_device)
    view.add_patches({KEY: (torch.ones(32, 32),)}, 0.5)
    before = snapshot(model.model)
    accelerator.set_capacity(int(view.model_size() * share))
    comfy.sd.save_checkpoint(str(tmp_path / "saved.safetensors"), view)
    plain, saved = (load_torch_file(str(p)) for p in (path, tmp_path / "saved.safetensors"))
    assert saved.keys() == {key for key in plain if key.startswith("model.diffusion_model.")}
    for key, weight in saved.items():
        changed = key == "model." + KEY
        want = plain[key] + 0.5 * changed
        step = torch.finfo(weight.dtype).eps * changed  # patched weights are rounded at random
        torch.testing.assert_close(weight, want.to(weight.dtype), rtol=step, atol=step)
    residency.unload_all_models()
    assert_untouched(model.model, before)
