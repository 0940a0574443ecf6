"""Wan HuMo: its network beside another implementation, and small files with a picture and sound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading
from comfy.families.wan_layout import USUAL_HUMO, read_wan_config
from comfy.ldm.wan.model_humo import HumoWanModel
from comfy.patching.patcher import ModelPatcher
from comfy.sampling import context_windows
from comfy.saving import save_checkpoint
from comfy.vae.vae import VAE
from comfy_extras.wan.sound import WanHuMoImageToVideo
from tests.comfy.families import wan_kinds
from tests.comfy.families.test_transformers import random_like
from tests.comfy.families.test_wan import SIZES as WAN
from tests.comfy.families.test_wan import sampled, wan_autoencoder
from tests.comfy.families.wan_kinds import noise
from tests.comfy.patching.test_packs_sampling import close
from tests.comfy.sampling.test_context_windows import handler_of

SIZES: dict[str, Any] = {
    **WAN, "in_dim": 36, "num_layers": 3, "audio_hidden": 6, "audio_width": 12, "audio_tokens": 3,
}  # fmt: skip
FRAME = (8, 5, 1280)  # states that tell of a frame


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def weights(**changes: Any) -> dict[str, Tensor]:
    """No two alike."""
    made = random_like(HumoWanModel(**{**SIZES, **changes}), 4)
    for number, (key, value) in enumerate(made.items()):
        if value.ndim == 1:
            made[key] = 0.5 * value + 0.2 * noise(*value.shape, seed=number)
    return made


def load(folder: Path, **changes: Any) -> Any:
    return wan_kinds.load(folder, weights(**changes))


def heard(seconds: float = 1.0, seed: int = 2) -> dict[str, Any]:
    """What Whisper large says of noise."""
    states = noise(33, 1, int(seconds * 50), 1280, seed=seed)
    return {
        "encoded_audio_all_layers": list(states.unbind()),
        "audio_samples": int(seconds * 16_000),
    }


def conditioned(**changes: Any) -> tuple[Any, Any, Tensor]:
    """What the node makes of a picture and a sound of noise: conditioning and an empty latent."""
    text = [[noise(1, 6, 24), {}]]
    picture = torch.rand(1, 32, 48, 3, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {
        "positive": text, "negative": text, "vae": VAE(sd=wan_autoencoder()), "width": 48,
        "height": 32, "length": 9, "batch_size": 1, "ref_image": picture,
        "audio_encoder_output": heard(),
    }  # fmt: skip
    made = WanHuMoImageToVideo.execute(**{**given, **changes})
    return made[0], made[1], made[2]["samples"]


def test_the_network_gives_what_another_implementation_gives() -> None:
    """That of the diffusers library for text to video, on the same weights, with PyTorch's own
    attention to sound hooked in behind its attention to text."""
    network = HumoWanModel(**SIZES).eval()
    network.load_state_dict(weights())
    made = network(
        noise(1, 36, 3, 4, 6),
        torch.tensor([300.0]),
        noise(1, 512, 24, seed=8),
        reference_latent=noise(1, 36, 1, 4, 6, seed=6),
        audio_embed=noise(1, 3, *FRAME, seed=7),
    )
    expected = [0.5719, -2.2335, -1.5234]
    torch.testing.assert_close(made[0, 2, :, 1, 3], torch.tensor(expected), rtol=1e-3, atol=1e-3)


def test_sizes_are_read_from_the_weights() -> None:
    config = read_wan_config(weights())
    assert config is not None
    assert {**config, **SIZES} == {**config, "num_heads": 2}
    assert config["model_type"] == "humo"


def test_published_networks_have_a_place_for_every_key(golden_folder: Path) -> None:
    wan_kinds.assert_a_place_for_every_key(golden_folder, "HuMo 17B", HumoWanModel, set(USUAL_HUMO))


@pytest.mark.parametrize("channels", [36, 16])
def test_a_picture_and_sound_lead_a_video_and_it_survives_saving(
    channels: int, tmp_path: Path
) -> None:
    """The small published network has no channels beside the latent."""
    model = load(tmp_path, in_dim=channels)
    assert type(model.model.model_config).__name__ == "WAN21_HuMo"
    given = conditioned()
    made = sampled(model, *given)
    assert made.shape == given[2].shape
    assert made.isfinite().all()
    for changes in (
        {"audio_encoder_output": None},
        {"audio_encoder_output": heard(seed=9)},
        {"ref_image": None},
    ):
        assert not torch.allclose(sampled(model, *conditioned(**changes)), made)
    path = str(tmp_path / "again.safetensors")
    save_checkpoint(path, model)
    assert torch.equal(sampled(loading.load_diffusion_model(path), *given), made)


def test_the_network_is_told_which_frames_are_known(tmp_path: Path) -> None:
    """Grey with a mask of 0 beside the video; the picture, known, behind it."""
    model = load(tmp_path).model
    positive, _, latent = conditioned()
    options = positive[0][1]
    made = model.extra_conds(noise=latent, device=latent.device, **options)
    beside, shown = made["c_concat"].cond, made["reference_latent"].cond
    assert beside.shape == (1, 20, 3, 4, 6)
    assert beside[:, :4].abs().max() == 0
    grey = VAE(sd=wan_autoencoder()).encode(torch.full((9, 32, 48, 3), 0.5))
    assert close(beside[:, 4:], model.process_latent_in(grey))
    picture = model.process_latent_in(options["reference_latents"][0])
    assert shown.shape == (1, 36, 1, 4, 6)
    assert close(shown[:, :16], picture)
    assert (shown[:, 16:20] == 1).all()
    assert close(shown[:, 20:], picture)
    shapes = {name: [size] for name, size in model.extra_conds_shapes(**options).items()}
    assert model.memory_required([1, 16, 3, 4, 6], shapes) == pytest.approx(
        model.memory_required([1, 16, 4, 4, 6])
    )


def test_windows_of_a_video_hear_their_own_part(tmp_path: Path) -> None:
    """Also if there are as many states around a frame as frames, and where the sound has ended."""
    model = load(tmp_path).model
    sound, latent = noise(1, 6, *FRAME), torch.zeros(1, 16, 8, 4, 6)
    made = model.extra_conds(noise=latent, device=latent.device, audio_embed=sound)
    handler = handler_of("standard_static", context_length=3, dim=2)
    window = context_windows.IndexListContextWindow([4, 5, 6], 2, 8)
    (part,) = handler.get_resized_cond([{"model_conds": made}], latent, window)
    heard = part["model_conds"]["audio_embed"].cond
    assert torch.equal(heard, torch.cat([sound[:, 4:], torch.zeros(1, 1, *FRAME)], dim=1))


def test_each_frame_hears_its_own_sound() -> None:
    """In the first block; others see what frames saw."""
    network = HumoWanModel(**SIZES)
    network.load_state_dict(weights())
    x, sound = noise(2, 4 * 6, 32), network.audio_proj(noise(2, 4, *FRAME))
    look: Any = network.blocks[0].audio_cross_attn_wrapper
    seen = look(x, sound)
    changed = sound.clone()
    changed[:, 2] = 1.0
    frames = (look(x, changed) - seen).unflatten(1, (4, 6)).abs().amax(dim=(2, 3))
    assert (frames > 0).tolist() == [[False, False, True, False]] * 2


def test_sound_that_is_too_long_or_short_ends_with_the_video() -> None:
    network = HumoWanModel(**SIZES)
    network.load_state_dict(weights())
    long = noise(1, 9, *FRAME)
    picture = noise(1, 36, 2, 4, 6, seed=6)
    args = noise(1, 36, 4, 4, 6), torch.tensor([300.0]), noise(1, 6, 24)

    def run(sound: Tensor | None) -> Tensor:
        return network(*args, reference_latent=picture, audio_embed=sound)

    assert close(run(long), run(long[:, :4]))
    silent = torch.cat([long[:, :2], torch.zeros(1, 2, *FRAME)], dim=1)
    assert close(run(long[:, :2]), run(silent))
    assert not torch.allclose(run(None), run(0 * long))


def test_what_does_not_fit_is_named() -> None:
    network = HumoWanModel(**SIZES)
    network.load_state_dict(weights())
    args = noise(1, 36, 4, 4, 6), torch.tensor([300.0]), noise(1, 6, 24)
    with pytest.raises(ValueError, match=r"audio_embed: expected 51200 numbers a frame.*1920"):
        network(*args, audio_embed=noise(1, 4, 8, 5, 48))
    with pytest.raises(ValueError, match=r"reference_latents: expected .* 4 x 6 cells.* 4 x 4"):
        network(*args, reference_latent=noise(1, 36, 1, 4, 4))


@pytest.mark.parametrize("kind", wan_kinds.PATCHERS)
def test_a_small_device_gives_the_same(
    kind: type[ModelPatcher], accelerator: Any, tmp_path: Path
) -> None:
    found = load(tmp_path, audio_in=40, dim=64)
    sound, picture = noise(1, 3, 2, 4, 5), noise(1, 16, 1, 4, 6)
    cond = [[noise(1, 6, 24), {"audio_embed": sound, "reference_latents": [picture]}]]
    given = cond, cond, torch.zeros(1, 16, 3, 4, 6)
    wan_kinds.assert_the_same_on_a_small_device(found, kind, accelerator, given)


@pytest.mark.parametrize(
    ("key", "rows", "columns"),
    [
        ("diffusion_model.blocks.0.audio_cross_attn_wrapper.audio_cross_attn.k", 32, 12),
        ("blocks.1.audio_cross_attn_wrapper.audio_cross_attn.o", 32, 32),
        ("diffusion_model.audio_proj.audio_proj_glob_2.layer", 6, 6),
        ("diffusion_model.blocks.2.self_attn.q", 32, 32),
    ],
)
def test_loras_change_a_view(
    key: str, rows: int, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = conditioned()
    shape = rows, columns
    wan_kinds.assert_a_lora_changes_a_view(load(tmp_path), key, shape, given, tmp_path, monkeypatch)
