"""LoRAs scheduled by hooks, in model and text encoder, beside LoRAs of a fixed strength."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading
from comfy.patching import hook_group
from comfy.patching.keyframes import HookKeyframe, HookKeyframeGroup
from comfy.sampling import noise, run, samplers
from comfy.weights.lora import model_lora_keys_clip, model_lora_keys_unet
from comfy_extras import nodes_hooks
from tests.support import tiny_checkpoint

SIGMAS = torch.tensor([14.6, 5.0, 2.0, 1.0, 0.2, 0.0])
LATENT = torch.zeros(1, 4, 8, 8)
STRENGTHS = {0.0: 0.25, 0.4: 1.0, 0.7: -0.5}  # by the part of the sampling they begin with
STRENGTH_MODEL, STRENGTH_CLIP = 0.8, 0.6
Models = tuple[Any, Any, dict[str, Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Model, text encoder and a LoRA for both."""
    path = tiny_checkpoint.write(tmp_path_factory.mktemp("hooks") / "tiny.safetensors")
    model, clip, *_ = loading.load_checkpoint_guess_config(str(path), output_vae=False)
    generator, lora = torch.Generator().manual_seed(1), {}
    tables = (
        (model_lora_keys_unet(model.model, {}), model.model.state_dict()),
        (model_lora_keys_clip(clip.cond_stage_model, {}), clip.cond_stage_model.state_dict()),
    )
    for keys, weights in tables:
        for name, key in keys.items():
            weight = weights.get(key) if name.startswith("lora_") else None
            if weight is not None and weight.ndim == 2:
                rows, columns = weight.shape
                lora[f"{name}.lora_up.weight"] = torch.randn(rows, 2, generator=generator) * 0.3
                lora[f"{name}.lora_down.weight"] = (
                    torch.randn(2, columns, generator=generator) * 0.3
                )
    return model, clip, lora


def scheduled_hooks(lora: dict[str, Tensor]) -> Any:
    schedule = HookKeyframeGroup()
    for start, strength in STRENGTHS.items():
        schedule.add(HookKeyframe(strength, start))
    hooks = hook_group.create_hook_lora(lora, STRENGTH_MODEL, STRENGTH_CLIP)
    return nodes_hooks.SetHookKeyframes().run(hooks, schedule)[0]


def encoded(clip: Any, text: str) -> list[Any]:
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def sampled(model: Any, clip: Any, start: Tensor, latent: Tensor, sigmas: Tensor) -> Tensor:
    positive, negative = encoded(clip, "a red circle"), encoded(clip, "blue")
    return run.sample_custom(
        model, start, 3.0, samplers.ksampler("euler"), sigmas, positive, negative, latent,
        disable_pbar=True, seed=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule_clip", "apply_to_conds"), [(True, True), (True, False), (False, True)]
)
def test_each_step_has_the_strength_of_its_time(
    models: Models, schedule_clip: bool, apply_to_conds: bool
) -> None:
    model, clip, lora = models
    (hooked,) = nodes_hooks.SetClipHooks().run(
        clip, schedule_clip, apply_to_conds, scheduled_hooks(lora)
    )
    start = noise.prepare_noise(LATENT, 3)
    made = sampled(model, hooked, start, LATENT, SIGMAS)
    to_sigma = model.model.model_sampling.percent_to_sigma
    x = start * SIGMAS[0]
    for place, sigma in enumerate(SIGMAS[:-1].tolist()):
        strength = [value for begin, value in STRENGTHS.items() if sigma <= to_sigma(begin)][-1]
        amounts = (
            STRENGTH_MODEL * strength if apply_to_conds else 0.0,
            STRENGTH_CLIP * (strength if schedule_clip else 1.0),
        )
        views = loading.load_lora_for_models(model, clip, lora, *amounts)
        before = model.model.process_latent_out(x)
        after = sampled(*views, torch.zeros_like(x), before, SIGMAS[place : place + 2])
        x = model.model.process_latent_in(after)
    expected = model.model.process_latent_out(x)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-4 * float(expected.std()))
    assert torch.equal(sampled(model, hooked, start, LATENT, SIGMAS), made)
    plain = sampled(model, clip, start, LATENT, SIGMAS)
    assert (made - plain).abs().max() > 1e-2 * expected.std()


def test_a_schedule_that_begins_at_the_end_still_encodes(models: Models) -> None:
    _, clip, lora = models
    schedule = HookKeyframeGroup()
    schedule.add(HookKeyframe(0.5, 1.0))
    hooks = hook_group.create_hook_lora(lora, 1.0, 1.0)
    hooks.set_keyframes_on_hooks(schedule)
    (hooked,) = nodes_hooks.SetClipHooks().run(clip, True, True, hooks)
    ((_, options),) = encoded(hooked, "a red circle")
    assert (options["clip_start_percent"], options["clip_end_percent"]) == (0.0, 1.0)


def test_what_of_a_hooks_lora_fits_nothing_is_said_once_a_run(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, clip, lora = models
    strange = {"lora_unet_nowhere.lora_up.weight": torch.ones(3, 2),
               "lora_te_nowhere.lora_up.weight": torch.ones(3, 2),
               "lora_unet_out_2.diff": torch.ones(1, 7)}  # fmt: skip
    hooks = hook_group.create_hook_lora(lora | strange, 1.0, 1.0)
    hooks.hooks[0].lora_name = "style.safetensors"
    notes: list[str] = []
    monkeypatch.setattr("comfy.progress.NOTE_HOOK", notes.append)
    (hooked,) = nodes_hooks.SetClipHooks().run(clip, True, True, hooks)
    encoded(hooked, "a red circle")
    assert len(notes) == 1
    assert f"style.safetensors: 1 of {len(lora) + 3} LoRA tensors fit no weight" in notes[0]
    assert "lora_te_nowhere" in notes[0]
    notes.clear()
    sampled(model, hooked, noise.prepare_noise(LATENT, 3), LATENT, SIGMAS)
    network = [note for note in notes if "unet" in note or "diffusion_model" in note]
    assert len(network) == 2
    assert "lora_unet_nowhere" in network[0]
    assert "1 of" in network[1]
    assert "diffusion_model.out.2.weight" in network[1]
