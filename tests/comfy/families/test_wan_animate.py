"""Wan Animate: its network beside another implementation, and small files with poses and faces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading
from comfy.families.wan_layout import read_wan_config
from comfy.ldm.wan.model_animate import AnimateWanModel
from comfy.patching.patcher import ModelPatcher
from comfy.saving import save_checkpoint
from comfy.vae.vae import VAE
from comfy_extras.wan import animate
from tests.comfy.families import wan_kinds
from tests.comfy.families.test_transformers import random_like
from tests.comfy.families.test_wan import SIZES as WAN
from tests.comfy.families.test_wan import sampled, wan_autoencoder
from tests.comfy.families.wan_kinds import noise
from tests.comfy.patching.test_packs_sampling import close

SIZES: dict[str, Any] = {
    **WAN, "in_dim": 36, "image_dim": 20, "num_layers": 10, "motion_widths": [4, 6, 6, 8],
    "style_dim": 10, "motion_dim": 3, "motion_depth": 2, "face_hidden": 6, "face_heads": 2,
}  # fmt: skip
SIDE = 32


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def weights() -> dict[str, Tensor]:
    """No two alike; filters as files have them; equalised layers as large as theirs are."""
    made = random_like(AnimateWanModel(**SIZES), 4)
    filter_ = torch.tensor([1.0, 3.0, 3.0, 1.0])
    for number, (key, value) in enumerate(made.items()):
        if key.endswith(".kernel"):
            made[key] = filter_[:, None] * filter_ / 64
        elif key.startswith("motion_encoder."):
            made[key] = noise(*value.shape, seed=number)
        elif value.ndim == 1:
            made[key] = 0.5 * value + 0.2 * noise(*value.shape, seed=number)
    return made


def load(folder: Path) -> Any:
    return wan_kinds.load(folder, weights())


def test_the_network_gives_what_another_implementation_gives() -> None:
    """The implementation of the diffusers library, on the same weights."""
    network = AnimateWanModel(**SIZES).eval()
    network.load_state_dict(weights())
    given = {"clip_fea": noise(1, 5, 20, seed=5), "pose_latents": noise(1, 16, 3, 4, 6, seed=6)}
    faces = noise(1, 3, 9, SIDE, SIDE, seed=7).clamp(-1, 1)
    times, text = torch.tensor([300.0]), noise(1, 512, 24, seed=8)
    made = network(noise(1, 36, 4, 4, 6), times, text, face_pixel_values=faces, **given)
    expected = [-3.3757, 0.0271, -2.2013, -1.4421]
    torch.testing.assert_close(made[0, 2, :, 1, 3], torch.tensor(expected), rtol=1e-3, atol=1e-3)


def test_sizes_are_read_from_the_weights() -> None:
    config = read_wan_config(weights())
    assert config is not None
    assert {**config, **SIZES} == {**config, "num_heads": 2}
    assert config["model_type"] == "animate"


def test_published_networks_have_a_place_for_every_key(golden_folder: Path) -> None:
    network: Any = wan_kinds.assert_a_place_for_every_key(
        golden_folder,
        "Wan2.2 Animate 14B",
        AnimateWanModel,
        {"motion_widths", "style_dim", "face_hidden"},
    )
    assert network.motion_encoder.side == animate.FACE_SIDE


def conditioned(folder: Path, **changes: Any) -> tuple[Any, Any, Tensor]:
    """What the node makes of videos of noise: conditioning and an empty latent."""
    vae = VAE(sd=wan_autoencoder())
    text = [[noise(1, 6, 24), {}]]
    frames = torch.rand(9, 32, 48, 3, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {
        "positive": text, "negative": text, "vae": vae, "width": 48, "height": 32, "length": 9,
        "batch_size": 1, "continue_motion_max_frames": 5, "video_frame_offset": 0,
        "reference_image": frames[:1], "face_video": frames, "pose_video": frames,
    }  # fmt: skip
    made = animate.WanAnimateToVideo.execute(**{**given, **changes})
    return made[0], made[1], made[2]["samples"]


def test_poses_and_faces_lead_a_video_and_it_survives_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(animate, "FACE_SIDE", SIDE)  # as this small network takes them
    model = load(tmp_path)
    assert type(model.model.model_config).__name__ == "WAN22_Animate"
    given = conditioned(tmp_path)
    made = sampled(model, *given)
    assert made.shape == given[2].shape
    assert made.isfinite().all()
    for changes in ({"face_video": None}, {"pose_video": None}):
        assert not torch.allclose(sampled(model, *conditioned(tmp_path, **changes)), made)
    path = str(tmp_path / "again.safetensors")
    save_checkpoint(path, model)
    assert torch.equal(sampled(loading.load_diffusion_model(path), *given), made)


def test_faces_do_not_change_what_the_first_frame_sees(tmp_path: Path) -> None:
    network = AnimateWanModel(**SIZES)
    network.load_state_dict(weights())
    faces = noise(2, 3, 9, SIDE, SIDE).clamp(-1, 1)
    tokens = network.motion(faces, 5)
    assert tokens.shape == (2, 5, 3, 32)
    assert tokens[:, 0].abs().max() == 0
    assert tokens[:, 4].abs().max() == 0  # nine pictures tell of three frames
    assert close(network.motion(faces[1:], 5), tokens[1:])
    later = faces.clone()
    later[:, :, 5:] = -1
    assert close(network.motion(later, 5)[:, :3], tokens[:, :3])
    with pytest.raises(ValueError, match="face_video: expected pictures of 32 x 32"):
        network.motion(noise(1, 3, 9, 16, 16), 5)
    poses = {"pose_latents": noise(1, 16, 3, 4, 4)}
    with pytest.raises(ValueError, match="pose_video: expected 2 x 3 patches a frame"):
        network(noise(1, 36, 4, 4, 6), torch.tensor([1.0]), noise(1, 4, 24), **poses)


@pytest.mark.parametrize("kind", wan_kinds.PATCHERS)
def test_a_small_device_gives_the_same(
    kind: type[ModelPatcher], accelerator: Any, tmp_path: Path
) -> None:
    found = load(tmp_path)
    faces = {"face_video_pixels": noise(1, 3, 9, SIDE, SIDE).clamp(-1, 1)}
    cond = [[noise(1, 6, 24), {**faces, "pose_video_latent": noise(1, 16, 3, 4, 6)}]]
    given = cond, cond, torch.zeros(1, 16, 4, 4, 6)
    wan_kinds.assert_the_same_on_a_small_device(found, kind, accelerator, given)


@pytest.mark.parametrize(
    ("key", "rows", "columns"),
    [
        ("diffusion_model.face_adapter.fuser_blocks.0.linear1_kv", 64, 32),
        ("face_adapter.1.to_v", 32, 32),
        ("transformer.face_adapter.0.to_out", 32, 32),
        ("diffusion_model.blocks.0.self_attn.q", 32, 32),
    ],
)
def test_loras_change_a_view(
    key: str, rows: int, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faces = {"face_video_pixels": noise(1, 3, 9, SIDE, SIDE).clamp(-1, 1)}
    cond = [[noise(1, 6, 24), faces]]
    given = cond, cond, torch.zeros(1, 16, 4, 4, 6)
    shape = rows, columns
    wan_kinds.assert_a_lora_changes_a_view(load(tmp_path), key, shape, given, tmp_path, monkeypatch)
