"""Nodes that set what particular families are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_extras import nodes_cond, nodes_edit_model, nodes_flux, nodes_lt, nodes_rope
from tests.comfy.sampling.support import TestModel, patcher

COND = [[torch.zeros(1, 2, 3), {"kept": 1}]]


def first_options(output: Any) -> dict[str, Any]:
    return output[0][0][1]


def test_guidance_is_set_and_switched_off() -> None:
    assert first_options(nodes_flux.FluxGuidance.execute(COND, 2.5)) == {"kept": 1, "guidance": 2.5}
    assert first_options(nodes_flux.FluxDisableGuidance.execute(COND))["guidance"] is None
    assert COND[0][1] == {"kept": 1}


def test_both_names_of_a_reference_method_are_one() -> None:
    node = nodes_flux.FluxKontextMultiReferenceLatentMethod
    assert first_options(node.execute(COND, "uxo/uno"))["reference_latents_method"] == "uxo"
    assert first_options(node.execute(COND, "index"))["reference_latents_method"] == "index"


def test_an_empty_flux2_latent_has_large_cells() -> None:
    latent = nodes_flux.EmptyFlux2LatentImage.execute(64, 32, 2)[0]
    assert latent["samples"].shape == (2, 128, 2, 4)


def test_reference_latents_gather() -> None:
    latent = {"samples": torch.ones(1, 4, 2, 2)}
    once = nodes_edit_model.ReferenceLatent.execute(COND, latent)[0]
    twice = nodes_edit_model.ReferenceLatent.execute(once, latent)[0]
    assert len(twice[0][1]["reference_latents"]) == 2
    assert len(once[0][1]["reference_latents"]) == 1
    assert nodes_edit_model.ReferenceLatent.execute(COND)[0] is COND


def test_the_shift_follows_the_tokens() -> None:
    base = TestModel("FLUX")
    base.model_config = SimpleNamespace(sampling_settings={})
    small = {"samples": torch.zeros(1, 128, 1, 32, 32)}
    for latent, expected in ((small, 0.95), (None, 2.05)):
        view = nodes_lt.ModelSamplingLTXV.execute(patcher(base), 2.05, 0.95, latent)[0]
        shift = view.get_model_object("model_sampling").shift
        assert shift == pytest.approx(expected)
    levels = nodes_lt.LTXVScheduler.execute(8, 2.05, 0.95, True, 0.1, small)[0]
    assert levels[-2] == pytest.approx(0.1)


def test_a_text_for_control_nets_rides_along() -> None:
    clip = SimpleNamespace(
        tokenize=lambda text: text,
        encode_from_tokens=lambda tokens, return_pooled: (f"context of {tokens}", "pooled"),
    )
    options = first_options(nodes_cond.CLIPTextEncodeControlnet.execute(clip, COND, "cat"))
    assert options["cross_attn_controlnet"] == "context of cat"
    assert options["pooled_output_controlnet"] == "pooled"


def test_padding_is_set_on_a_view_for_every_t5() -> None:
    options: dict[str, int] = {}
    view = SimpleNamespace(set_tokenizer_option=options.__setitem__)
    nodes_cond.T5TokenizerOptions.execute(SimpleNamespace(clone=lambda: view), 3, 7)
    assert options["t5xxl_min_padding"] == 3
    assert options["umt5xxl_min_length"] == 7


def test_positions_are_scaled_on_a_view_only() -> None:
    model = patcher(TestModel())
    view = nodes_rope.ScaleROPE.execute(model, 2.0, 0.0, 1.0, 5.0, 1.0, 0.0)[0]
    options = view.model_options["transformer_options"]["rope_options"]
    assert (options["scale_x"], options["shift_y"]) == (2.0, 5.0)
    assert "rope_options" not in model.model_options["transformer_options"]
