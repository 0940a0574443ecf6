"""Newer families with little memory: the same latent wherever their weights are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from comfy import loading
from comfy.devices import residency
from comfy.ldm.ace.model import ACEStepTransformer2DModel
from comfy.ldm.ace.model15 import AceStep15
from comfy.ldm.audio.dit import AudioDiffusionTransformer
from comfy.ldm.aura.mmdit import MMDiT
from comfy.ldm.chroma_radiance.model import ChromaRadiance
from comfy.ldm.cosmos.model import GeneralDIT
from comfy.ldm.cosmos.predict2 import MiniTrainDIT
from comfy.ldm.genmo.model import AsymmDiTJoint
from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel
from comfy.ldm.hunyuan3dv2_1.hunyuandit import HunYuanDiTPlain
from comfy.ldm.hydit.models import HunYuanDiT
from comfy.ldm.kandinsky5.model import Kandinsky5
from comfy.ldm.lumina.model import NextDiT
from comfy.ldm.omnigen.omnigen2 import OmniGen2Transformer2DModel
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.patcher import ModelPatcher
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families import (
    test_ace_step,
    test_ace_step15,
    test_auraflow,
    test_cascade,
    test_chroma_radiance,
    test_cosmos,
    test_cosmos_video,
    test_hidream,
    test_hunyuan3d21,
    test_hunyuan_dit,
    test_kandinsky5,
    test_lumina2,
    test_mochi,
    test_omnigen2,
    test_stable_audio,
)
from tests.comfy.families.small_files import PREFIX, prefixed, write
from tests.comfy.families.test_transformers import random_like
from tests.comfy.patching.test_packs_sampling import close
from tests.support.accelerator import assert_untouched, bytes_of, snapshot


class Case(NamedTuple):
    """A network, its sizes, the shape of a latent, the text's width and further conditioning."""

    kind: Any
    sizes: dict[str, Any]
    shape: tuple[int, ...]
    text: int
    others: Mapping[str, tuple[int, ...]] = MappingProxyType({})


POOLED = {"pooled_output": (1, test_cascade.TEXT)}
CASES = {
    "ace_step": Case(
        ACEStepTransformer2DModel, test_ace_step.SIZES, (1, 8, 16, 5), test_ace_step.TEXT
    ),
    "ace_step15": Case(
        AceStep15,
        test_ace_step15.SIZES,
        (1, 64, 9),
        test_ace_step15.SIZES["text_dim"],
        {
            "conditioning_lyrics": (1, 7, test_ace_step15.SIZES["text_dim"]),
            "silence_latent": (1, 64, 90),
        },
    ),
    "auraflow": Case(MMDiT, test_auraflow.SIZES, (1, 4, 6, 5), test_auraflow.WIDTH),
    "lumina2": Case(NextDiT, test_lumina2.SIZES, test_lumina2.SHAPE, test_lumina2.TEXT),
    "stable_audio": Case(
        AudioDiffusionTransformer, test_stable_audio.SIZES, (1, 64, 9), test_stable_audio.TEXT
    ),
    "cosmos": Case(MiniTrainDIT, test_cosmos.SIZES, test_cosmos.SHAPE, test_cosmos.TEXT),
    "cosmos_video": Case(
        GeneralDIT, test_cosmos_video.SIZES, test_cosmos_video.SHAPE, test_cosmos.TEXT
    ),
    "kandinsky5": Case(
        Kandinsky5,
        test_kandinsky5.SIZES,
        test_kandinsky5.VIDEO_SHAPE,
        test_kandinsky5.TEXT,
        {"pooled_output": (1, test_kandinsky5.POOLED)},
    ),
    "omnigen2": Case(
        OmniGen2Transformer2DModel, test_omnigen2.SIZES, test_omnigen2.SHAPE, test_omnigen2.WIDTH
    ),
    "hidream": Case(
        HiDreamImageTransformer2DModel,
        test_hidream.SIZES,
        test_hidream.SHAPE,
        test_hidream.T5_WIDTH,
        {
            "pooled_output": (1, test_hidream.POOLED),
            "conditioning_llama3": (1, 4, 5, test_hidream.LLAMA_WIDTH),
        },
    ),
    "hunyuan_dit": Case(
        HunYuanDiT,
        test_hunyuan_dit.SIZES,
        test_hunyuan_dit.SHAPE,
        test_hunyuan_dit.TEXT,
        {"conditioning_mt5xl": (1, 5, test_hunyuan_dit.T5_TEXT)},
    ),
    "radiance": Case(ChromaRadiance, test_chroma_radiance.SIZES, (1, 3, 8, 8), 24),
    "hunyuan3d21": Case(HunYuanDiTPlain, test_hunyuan3d21.SIZES, (1, 64, 12), 48),
    "mochi": Case(AsymmDiTJoint, test_mochi.SIZES, test_mochi.SHAPE, test_mochi.TEXT),
    "cascade_c": Case(*test_cascade.NETWORKS["c"], test_cascade.C_SHAPE, test_cascade.TEXT, POOLED),
    "cascade_b": Case(*test_cascade.NETWORKS["b"], test_cascade.B_SHAPE, test_cascade.TEXT, POOLED),
}


def model_of(name: str, folder: Path) -> ModelPatcher:
    case = CASES[name]
    if name == "stable_audio":  # embedders of numbers stand beside the network
        tensors = prefixed(test_stable_audio.network(), test_stable_audio.PREFIX)
        tensors |= test_stable_audio.numbers()
    else:
        tensors = prefixed(random_like(case.kind(**case.sizes), 4), PREFIX)
    return loading.load_diffusion_model(write(tensors, folder / "model.safetensors"))


def sampled(model: Any, case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    text = torch.randn(1, 6, case.text, generator=generator)
    others = {k: torch.randn(shape, generator=generator) for k, shape in case.others.items()}
    cond = [[text, others]]
    latent = {"samples": torch.zeros(case.shape)}
    made = common_ksampler(model, 3, 2, 1.0, "euler", "simple", cond, cond, latent)
    samples: Tensor = made[0]["samples"]
    assert samples.isfinite().all()
    return samples


@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_a_small_device_gives_the_same_latent(
    name: str, kind: type[ModelPatcher], accelerator: Any, tmp_path: Path
) -> None:
    found = model_of(name, tmp_path)
    before = snapshot(found.model)

    def made() -> Tensor:
        residency.unload_all_models()
        view = kind(found.model, torch.device(f"{accelerator.NAME}:0"), found.offload_device)
        return sampled(view, CASES[name])

    want = made()
    peak = torch.accelerator.max_memory_allocated(0)
    # What the run itself takes stays free: in a network so small that is as much as the weights.
    accelerator.set_capacity(int(peak - 0.4 * bytes_of(found.model)), 0)
    assert close(made(), want)
    residency.unload_all_models()
    assert_untouched(found.model, before)


@pytest.mark.parametrize("name", CASES)
def test_memory_estimates_grow_with_the_latent(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path).model
    shape = list(CASES[name].shape)
    small = model.memory_required(shape)
    assert small > 0
    shape[-1] *= 2
    assert model.memory_required(shape) == pytest.approx(2 * small)
