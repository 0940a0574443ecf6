"""Wan S2V: its network beside another implementation, and small files with a picture and sound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading
from comfy.families.wan_layout import USUAL_S2V, read_wan_config
from comfy.ldm.wan.model_s2v import S2VWanModel
from comfy.patching.patcher import ModelPatcher
from comfy.sampling import context_windows
from comfy.saving import save_checkpoint
from comfy_extras.wan.sound import WanSoundImageToVideo, WanSoundImageToVideoExtend
from tests.comfy.families import wan_kinds
from tests.comfy.families.test_transformers import random_like
from tests.comfy.families.test_wan import SIZES as WAN
from tests.comfy.families.test_wan import sampled
from tests.comfy.families.wan_kinds import noise
from tests.comfy.patching.test_packs_sampling import close
from tests.comfy.sampling.test_context_windows import handler_of
from tests.comfy_extras.test_wan_motion import CausalVAE

SIZES: dict[str, Any] = {
    **WAN, "dim": 48, "num_layers": 5, "audio_dim": 6, "audio_layers": 3, "audio_heads": 2,
}  # fmt: skip
SMALL = (8, 12)  # cells of a frame


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def weights() -> dict[str, Tensor]:
    """No two alike; layers of sound weigh as much as in files."""
    made = random_like(S2VWanModel(**SIZES), 4)
    for number, (key, value) in enumerate(made.items()):
        if key == "casual_audio_encoder.weights":
            made[key] = 0.5 + 0.2 * noise(*value.shape)
        elif value.ndim == 1 or key.startswith(("casual_audio_encoder.", "trainable")):
            made[key] = 0.5 * value + 0.2 * noise(*value.shape, seed=number)
    return made


def network() -> S2VWanModel:
    made = S2VWanModel(**SIZES).eval()
    made.load_state_dict(weights())
    return made


def load(folder: Path) -> Any:
    return wan_kinds.load(folder, weights())


def heard(seconds: float = 2.0, seed: int = 2) -> dict[str, Any]:
    """What a small audio encoder says of noise."""
    states = noise(SIZES["audio_layers"], 1, int(seconds * 50), SIZES["audio_dim"], seed=seed)
    return {"encoded_audio_all_layers": list(states.unbind())}


def frames(count: int, seed: int = 1) -> Tensor:
    return torch.rand(count, 64, 96, 3, generator=torch.Generator().manual_seed(seed))


def conditioned(**changes: Any) -> tuple[Any, Any, Tensor]:
    """What the node makes of pictures and a sound of noise: conditioning and an empty latent."""
    text = [[noise(1, 6, 24), {}]]
    given: dict[str, Any] = {
        "positive": text, "negative": text, "vae": CausalVAE(), "width": 96,
        "height": 64, "length": 9, "batch_size": 1, "ref_image": frames(1),
        "audio_encoder_output": heard(), "ref_motion": frames(3, 4),
    }  # fmt: skip
    made = WanSoundImageToVideo.execute(**{**given, **changes})
    return made[0], made[1], made[2]["samples"]


def inputs(count: int = 3) -> dict[str, Tensor]:
    """What the network gets beside the latent and text."""
    return {
        "reference_latent": noise(1, 16, 1, *SMALL, seed=6),
        "reference_motion": noise(1, 16, 19, *SMALL, seed=9),
        "control_video": noise(1, 16, count, *SMALL, seed=10),
        "audio_embed": noise(1, 3, 6, 4 * count, seed=7),
    }


def run(model: S2VWanModel, count: int = 3, **given: Any) -> Tensor:
    text = noise(1, 512, 24, seed=8)
    made: Tensor = model(noise(1, 16, count, *SMALL), torch.tensor([300.0]), text, **given)
    return made


@pytest.mark.parametrize(
    ("goes_on", "expected"),
    [(True, [3.1868, -0.1436, 3.2885]), (False, [3.1524, -0.187, 3.2332])],
)
def test_the_network_gives_what_another_implementation_gives(
    goes_on: bool, expected: list[float]
) -> None:
    """That of the diffsynth-engine library, on the same weights, whose norm before attention to
    sound got the epsilon of the published code."""
    given = inputs()
    if not goes_on:
        del given["reference_motion"]
    made = run(network(), **given)
    torch.testing.assert_close(made[0, 2, :, 1, 3], torch.tensor(expected), rtol=1e-3, atol=1e-3)


def test_sizes_are_read_from_the_weights() -> None:
    config = read_wan_config(weights())
    assert config is not None
    assert {**config, **SIZES} == {**config, "num_heads": 2}
    assert config["model_type"] == "s2v"


def test_published_networks_have_a_place_for_every_key(golden_folder: Path) -> None:
    wan_kinds.assert_a_place_for_every_key(
        golden_folder, "Wan2.2 S2V 14B", S2VWanModel, set(USUAL_S2V)
    )


def test_a_person_speaks_and_goes_on_and_it_survives_saving(tmp_path: Path) -> None:
    model = load(tmp_path)
    assert type(model.model.model_config).__name__ == "WAN22_S2V"
    given = conditioned()
    made = sampled(model, *given)
    assert made.shape == given[2].shape
    assert made.isfinite().all()
    for changes in (
        {"audio_encoder_output": None},
        {"audio_encoder_output": heard(seed=9)},
        {"ref_image": None},
        {"ref_motion": None},
        {"control_video": frames(9, 7)},
    ):
        assert not torch.allclose(sampled(model, *conditioned(**changes)), made)
    more = WanSoundImageToVideoExtend.execute(
        *given[:2], CausalVAE(), 9, {"samples": made}, frames(1), heard(), None
    )
    after = sampled(model, more[0], more[1], more[2]["samples"])
    assert after.isfinite().all()
    path = str(tmp_path / "again.safetensors")
    save_checkpoint(path, model)
    assert torch.equal(sampled(loading.load_diffusion_model(path), *given), made)


def test_sound_that_is_too_long_or_short_ends_with_the_video() -> None:
    model, long = network(), noise(1, 3, 6, 20, seed=7)
    assert close(run(model, audio_embed=long), run(model, audio_embed=long[..., :12]))
    silent = torch.cat([long[..., :5], torch.zeros(1, 3, 6, 7)], dim=3)
    assert close(run(model, audio_embed=long[..., :5]), run(model, audio_embed=silent))
    assert not torch.allclose(run(model), run(model, audio_embed=0 * long))


def test_few_earlier_frames_stand_behind_nothing() -> None:
    model = network()
    few = noise(1, 16, 4, *SMALL)
    whole = torch.cat([torch.zeros(1, 16, 15, *SMALL), few], dim=2)
    assert close(run(model, reference_motion=few), run(model, reference_motion=whole))
    more = torch.cat([noise(1, 16, 2, *SMALL), whole], dim=2)
    assert close(run(model, reference_motion=more), run(model, reference_motion=whole))


def test_windows_of_a_video_see_their_own_part(tmp_path: Path) -> None:
    """Of sound and poses; the frames before the video are whole, even if there are as many."""
    model = load(tmp_path).model
    latent, poses, before = (noise(1, 16, 19, *SMALL, seed=seed) for seed in range(3))
    sound = noise(1, 3, 6, 68)
    given = {"audio_embed": sound, "control_video": poses, "reference_motion": before}
    made = model.extra_conds(noise=latent, device=latent.device, **given)
    handler = handler_of("standard_static", context_length=3, dim=2)
    window = context_windows.IndexListContextWindow([15, 16, 17], 2, 19)
    (part,) = handler.get_resized_cond([{"model_conds": made}], latent, window)
    cut = {name: value.cond for name, value in part["model_conds"].items()}
    silent = torch.zeros(1, 3, 6, 4)
    assert torch.equal(cut["audio_embed"], torch.cat([sound[..., 60:], silent], dim=3))
    assert torch.equal(cut["control_video"], model.process_latent_in(poses)[:, :, 15:18])
    assert torch.equal(cut["reference_motion"], model.process_latent_in(before))


def test_pictures_and_earlier_frames_weigh_in_the_estimate(tmp_path: Path) -> None:
    model = load(tmp_path).model
    options = conditioned()[0][0][1]
    shapes = {name: [size] for name, size in model.extra_conds_shapes(**options).items()}
    needed = model.memory_required([1, 16, 3, *SMALL], shapes)
    assert needed == pytest.approx(model.memory_required([1, 16, 11, *SMALL]) / 2)


def test_what_does_not_fit_is_named() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"audio_embed: expected states of 3 layers of width 6"):
        run(model, audio_embed=noise(1, 4, 6, 12))
    with pytest.raises(ValueError, match=r"control_video: expected 3 frames .* found 2 frames"):
        run(model, control_video=noise(1, 16, 2, *SMALL))
    with pytest.raises(ValueError, match=r"reference_motion: expected frames of at least 8 x 8"):
        run(model, reference_motion=noise(1, 16, 19, 4, 12))


@pytest.mark.parametrize("kind", wan_kinds.PATCHERS)
def test_a_small_device_gives_the_same(
    kind: type[ModelPatcher], accelerator: Any, tmp_path: Path
) -> None:
    found, given = load(tmp_path), conditioned()
    wan_kinds.assert_the_same_on_a_small_device(found, kind, accelerator, given)


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        ("diffusion_model.audio_injector.injector.1.v", 48),
        ("audio_injector.injector_adain_layers.0.linear", 96),
        ("diffusion_model.casual_audio_encoder.encoder.final_linear", 48),
        ("diffusion_model.blocks.2.self_attn.q", 48),
    ],
)
def test_loras_change_a_view(
    key: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = conditioned()
    shape = rows, 48
    wan_kinds.assert_a_lora_changes_a_view(load(tmp_path), key, shape, given, tmp_path, monkeypatch)
