"""Guidance inside the attention of Qwen-Image, Z-Image and Wan, from files to latents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading, text_loading
from comfy_extras.nodes_nag import NAGuidance
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.test_qwen import qwen_image_files, z_image_files
from tests.comfy.families.test_wan import wan_files

Files = Callable[[Path], dict[str, str]]
CASES: dict[str, tuple[Files, Any, tuple[int, ...]]] = {
    "Qwen-Image": (qwen_image_files, text_loading.CLIPType.QWEN_IMAGE, (1, 16, 8, 6)),
    "Z-Image": (z_image_files, text_loading.CLIPType.QWEN_IMAGE, (1, 16, 8, 6)),
    "Wan": (wan_files, text_loading.CLIPType.WAN, (1, 16, 3, 4, 6)),
}


@pytest.mark.parametrize("family", CASES)
@torch.inference_mode()
def test_the_negative_text_counts_at_a_scale_of_one_by_nag(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, kind, shape = CASES[family]
    paths = files(tmp_path)
    model = loading.load_diffusion_model(paths["model"])
    clip = text_loading.load_clip([paths["clip"]], clip_type=kind)

    def text(words: str) -> Any:
        return clip.encode_from_tokens_scheduled(clip.tokenize(words))

    def sampled(chosen: Any, negative: str) -> Tensor:
        conds = (text("a red cat"), text(negative))
        latent = {"samples": torch.zeros(shape)}
        out = common_ksampler(chosen, 7, 2, 1.0, "euler", "simple", *conds, latent)
        samples: Tensor = out[0]["samples"]
        return samples

    plain = sampled(model, "a dog")
    assert torch.equal(sampled(model, "the sea"), plain)
    neutral = sampled(NAGuidance.execute(model, 1.0, 0.5, 1.5)[0], "a dog")
    torch.testing.assert_close(neutral, plain, rtol=1e-3, atol=1e-3)
    led = NAGuidance.execute(model, 5.0, 0.5, 2.5)[0]
    away = sampled(led, "a dog")
    assert (away - plain).abs().max() > 10 * (neutral - plain).abs().max()
    assert not torch.equal(sampled(led, "the sea"), away)
    assert torch.equal(sampled(model, "a dog"), plain)
    assert "no effect" not in caplog.text
