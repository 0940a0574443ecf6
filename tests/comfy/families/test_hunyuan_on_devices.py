"""HunyuanImage 2.1 and HunyuanVideo 1.5 with little memory: the same wherever weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading, text_loading
from comfy.devices import residency
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.patcher import ModelPatcher
from tests.comfy.families import test_hunyuan_image as hunyuan
from tests.comfy.patching.test_packs_sampling import close
from tests.support.accelerator import assert_untouched, bytes_of, snapshot

NETWORKS = {
    "image": (hunyuan.IMAGE, hunyuan.IMAGE_VAE, (1, 64, 3, 2)),
    "video": (hunyuan.VIDEO, hunyuan.VIDEO_VAE, (1, 32, 2, 2, 3)),
}


@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
@pytest.mark.parametrize("name", NETWORKS)
@torch.inference_mode()
def test_a_small_device_gives_the_same_latent(
    name: str, kind: type[ModelPatcher], accelerator: Any, tmp_path: Path
) -> None:
    network, vae, shape = NETWORKS[name]
    paths = hunyuan.files(tmp_path, network, vae)
    clip_type = text_loading.CLIPType.HUNYUAN_IMAGE
    clip = text_loading.load_clip([paths["qwen"], paths["byt5"]], clip_type=clip_type)
    found = loading.load_diffusion_model(paths["model"])
    before = snapshot(found.model)
    latent = {"samples": torch.zeros(shape)}

    def made() -> tuple[Tensor, Tensor]:
        residency.unload_all_models()
        view = kind(found.model, torch.device(f"{accelerator.NAME}:0"), found.offload_device)
        positive = hunyuan.conditioned(clip, 'a "cat"')
        return positive[0][1]["conditioning_byt5small"], hunyuan.sampled(view, positive, latent)

    want = made()
    for share in (0.9, 0.75):  # one layer over ByT5 has more than half of all weights
        accelerator.set_capacity(int(share * bytes_of(found.model)), 0)
        for part, expected in zip(made(), want):
            assert close(part, expected), share
    residency.unload_all_models()
    assert_untouched(found.model, before)
