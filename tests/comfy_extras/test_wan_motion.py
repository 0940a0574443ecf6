"""Wan models that are given motion: cameras, poses, tracks and sound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from comfy import latent_formats
from comfy_extras.nodes_camera_trajectory import WanCameraEmbedding
from comfy_extras.nodes_wan import (
    WanAnimateToVideo,
    WanHuMoImageToVideo,
    WanSoundImageToVideo,
    WanSoundImageToVideoExtend,
    WanTrackToVideo,
)
from comfy_extras.nodes_wanmove import WanMoveTrackToVideo, WanMoveVisualizeTracks
from tests.comfy_extras.test_video_conditioning import COND, VideoVAE, options, picture


def camera(way: str, length: int = 9, **changes: Any) -> Tensor:
    sizes = {"width": 32, "height": 16, "length": length}
    return WanCameraEmbedding.execute(way, **{**sizes, **changes})[0]


def frame_rays(embedding: Tensor, frame: int) -> Tensor:
    """The moment and direction of a frame's rays [6, H, W]."""
    cell, slot = divmod(frame + 3, 4)
    return embedding[0].unflatten(0, (6, 4))[:, slot, cell]


def test_a_still_camera_looks_along_the_same_rays() -> None:
    embedding = camera("Static")
    assert embedding.shape == (1, 24, 3, 16, 32)
    rays = frame_rays(embedding, 8)
    assert torch.equal(rays, frame_rays(embedding, 0))
    assert not rays[:3].any()
    assert torch.allclose(rays[3:].norm(dim=0), torch.ones(16, 32))
    # Focal lengths are shares of the sides of a 16:9 picture, of which this one is a part.
    x = (31.5 - 16) / (0.5 * 32)
    y = (15.5 - 8) / (0.5 * 2 / (1280 / 720) * 16)
    found = rays[3:, 15, 31] / rays[5, 15, 31]
    assert found.tolist() == pytest.approx([x, y, 1.0], abs=1e-5)


@pytest.mark.parametrize(
    ("way", "axis", "sign"),
    [
        ("Pan Up", 1, 1), ("Pan Down", 1, -1), ("Pan Left", 0, 1), ("Pan Right", 0, -1),
        ("Zoom In", 2, -2), ("Zoom Out", 2, 2),
    ],
)  # fmt: skip
def test_a_moving_camera_has_moments_of_its_place(way: str, axis: int, sign: int) -> None:
    rays = frame_rays(camera(way, speed=2.0), 4)
    origin = torch.zeros(3)
    origin[axis] = sign * 2.0 * 1.5 * 4 / 9  # opposite to the way the scene moves
    direction = rays[3:]
    expected = torch.linalg.cross(origin[:, None, None].expand_as(direction), direction, dim=0)
    assert torch.allclose(rays[:3], expected, atol=1e-5)


def test_a_turning_camera_turns_about_its_axis() -> None:
    still, turned = camera("Static"), camera("ClockWise (CW)")
    a, b = frame_rays(still, 6)[3:, 3, 5], frame_rays(turned, 6)[3:, 3, 5]
    angle = math.atan2(b[1], b[0]) - math.atan2(a[1], a[0])
    assert angle % math.tau == pytest.approx(math.tau - math.pi / 3 * 6 / 9, abs=1e-4)
    assert a[2] == pytest.approx(b[2].item())


@pytest.mark.parametrize(("length", "cells"), [(1, 1), (2, 1), (4, 1), (5, 2), (81, 21)])
def test_a_camera_has_as_many_cells_as_the_video(length: int, cells: int) -> None:
    made = WanCameraEmbedding.execute("Zoom In", 16, 16, length)
    assert made[0].shape == (1, 24, cells, 16, 16)
    assert (made[1], made[2], made[3]) == (16, 16, length)
    with pytest.raises(ValueError, match="fx: expected a focal length above 0"):
        WanCameraEmbedding.execute("Zoom In", 16, 16, length, fx=0.0)


def animate(**changes: Any) -> Any:
    given = {
        "positive": COND, "negative": COND, "vae": VideoVAE(), "width": 32, "height": 16,
        "length": 9, "batch_size": 1, "continue_motion_max_frames": 5, "video_frame_offset": 0,
    }  # fmt: skip
    return WanAnimateToVideo.execute(**{**given, **changes})


def test_animate_puts_the_person_before_the_video() -> None:
    made = animate(reference_image=picture(1.0), batch_size=2)
    values = options(made[0])
    assert values["concat_latent_image"].shape == (1, 16, 4, 2, 4)
    assert values["concat_latent_image"][:, :, 0].min() == 1.0
    assert (values["concat_latent_image"][:, :, 1:] == 0.5).all()
    assert values["concat_mask"].shape == (1, 4, 4, 2, 4)
    assert values["concat_mask"][0, :, :, 0, 0].sum(dim=0).tolist() == [0.0, 4.0, 4.0, 4.0]
    assert made[2]["samples"].shape == (2, 16, 4, 2, 4)
    assert (made[3], made[4], made[5]) == (1, 0, 9)
    assert not options(animate()[0])["concat_latent_image"][:, :, 0].any()


def test_animate_goes_on_from_what_was_made() -> None:
    vae = VideoVAE()
    made = animate(
        vae=vae,
        continue_motion=picture(1.0, 20),
        video_frame_offset=9,
        background_video=torch.linspace(0, 0.9, 18)[:, None, None, None].expand(18, 16, 32, 3),
        face_video=picture(0.0, 20, 24),
        pose_video=picture(0.25, 10),
    )
    values = options(made[0])
    video = vae.seen[1][:, 0, 0, 0]
    assert video[:5].tolist() == [1.0] * 5
    frames = torch.linspace(0, 0.9, 18)[4:13]  # the last five frames made are shown again
    assert torch.allclose(video[5:], frames[5:])
    assert values["concat_mask"][0, :, :, 0, 0].sum(dim=0).tolist() == [0.0, 0.0, 0.0, 4.0]
    assert (made[4], made[5]) == (5, 13)
    assert values["face_video_pixels"].shape == (1, 3, 9, 512, 512)
    assert (values["face_video_pixels"] == -1).all()
    assert (options(made[1])["face_video_pixels"] == -1).all()
    assert values["pose_video_latent"].shape == (1, 16, 3, 2, 4)
    assert vae.seen[2].shape[0] == 9  # the last pose stands for those that are missing


def test_animate_paints_where_the_person_is() -> None:
    mask = torch.zeros(1, 32, 64)
    mask[:, :, 32:] = 1.0
    painted = options(animate(character_mask=mask)[0])["concat_mask"]
    # Entries of the mask are frames, counted from the first one's four: so three stay unmasked.
    assert painted[0, :, 1:3, :, :2].sum() == 0
    assert painted[0, :, 3, 0, 0].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert painted[0, :, 1:, :, 2:].mean() == 1.0
    changing = torch.ones(3, 16, 32)
    changing[1] = 0.0
    shown = options(animate(character_mask=changing)[0])["concat_mask"][0, :, 1:, 0, 0]
    assert shown.T.flatten().tolist() == [1.0, 0.0] + [1.0] * 10
    # Videos that ended before this part are as if they were not given.
    late = animate(
        video_frame_offset=50, pose_video=picture(0.0, 9), face_video=picture(0.0, 9),
        background_video=picture(0.0, 9), character_mask=changing,
    )  # fmt: skip
    assert {"pose_video_latent", "face_video_pixels"}.isdisjoint(options(late[0]))
    assert options(late[0])["concat_mask"][:, :, 1:].min() == 1.0


def heard(layers: int, frames: int, width: int = 6) -> dict[str, Any]:
    states = torch.arange(float(frames))[None, :, None].expand(1, frames, width)
    return {
        "encoded_audio_all_layers": [states + 1000 * layer for layer in range(layers)],
        "audio_samples": frames * 320,
    }


def test_speech_drives_every_frame() -> None:
    args = (COND, COND, VideoVAE(), 32, 16, 9, 1)
    made = WanSoundImageToVideo.execute(*args, audio_encoder_output=heard(2, 100))
    states = options(made[0])["audio_embed"]
    assert states.shape == (1, 2, 6, 12)
    # 16 frames a second of states that were 50 and became 30: 1.875 steps, rounded, of 59 in 99
    expected = [round(n * 1.875) * 99 / 59 for n in range(12)]
    assert states[0, 0, 0].tolist() == pytest.approx(expected, abs=1e-3)
    assert states[0, 1, 0, 0] == 1000.0
    assert not options(made[1])["audio_embed"].any()
    nothing = latent_formats.Wan21().process_out(torch.zeros(1, 16, 3, 2, 4))
    assert torch.equal(options(made[0])["control_video"], nothing)
    assert "reference_motion" not in options(made[0])


def test_speech_goes_on_where_the_video_ended() -> None:
    vae = VideoVAE()
    args = (COND, COND, vae, 32, 16, 9, 1)
    first = WanSoundImageToVideo.execute(
        *args, picture(1.0), heard(2, 100), picture(0.25, 20), picture(0.75, 80)
    )
    values = options(first[0])
    assert values["reference_motion"].shape == (1, 16, 19, 2, 4)
    assert torch.allclose(values["control_video"], torch.tensor(0.25))
    assert values["reference_latents"][0].shape == (1, 16, 1, 2, 4)
    few = WanSoundImageToVideo.execute(*args, ref_motion=picture(1.0, 2))
    assert vae.seen[-1].shape == (73, 16, 32, 3)
    assert vae.seen[-1][:, 0, 0, 0].tolist() == [0.5] * 71 + [1.0] * 2
    assert options(few[0])["reference_motion"].shape[2] == 19
    before = {"samples": torch.ones(1, 16, 3, 2, 4)}
    next_one = WanSoundImageToVideoExtend.execute(
        COND, COND, vae, 9, before, audio_encoder_output=heard(2, 100)
    )
    states = options(next_one[0])["audio_embed"][0, 0, 0]
    assert states[0] == pytest.approx(round(12 * 1.875) * 99 / 59, abs=1e-3)
    assert next_one[2]["samples"].shape == (1, 16, 3, 2, 4)
    assert options(next_one[0])["reference_motion"] is not None
    far = {"samples": torch.ones(1, 16, 300, 2, 4)}
    silent = WanSoundImageToVideoExtend.execute(
        COND, COND, vae, 9, far, audio_encoder_output=heard(2, 100)
    )
    assert "audio_embed" not in options(silent[0])
    with pytest.raises(ValueError, match=r"at least 0\.033 seconds"):
        WanSoundImageToVideo.execute(*args, audio_encoder_output=heard(2, 1))
    with pytest.raises(ValueError, match=r"video_latent: .*16 channels.* found 4"):
        WanSoundImageToVideoExtend.execute(
            COND, COND, vae, 9, {"samples": torch.ones(1, 4, 1, 2, 2)}
        )


def test_humo_hears_around_each_cell() -> None:
    made = WanHuMoImageToVideo.execute(
        COND, COND, VideoVAE(), 32, 16, 9, 1, picture(1.0), heard(33, 40, 1280)
    )
    states = options(made[0])["audio_embed"]
    assert states.shape == (1, 3, 8, 5, 1280)
    # 40 states are 20 frames; linear steps of 39 / 19
    frames = (states[0, :, :, 4, 0] - 32_000) / (39 / 19)
    assert frames[1].tolist() == pytest.approx([-32_000 * 19 / 39, *range(7)], abs=1e-2)
    assert not states[0, 0, :5].any()  # nothing is heard before the first frame
    assert states[0, 0, 5, 4, 0] == 32_000.0
    assert states[0, 0, 5, 0, 0] == 3500.0  # the mean of the first eight layers
    assert not options(made[1])["audio_embed"].any()
    assert options(made[0])["reference_latents"][0].min() == 1.0
    assert not options(made[1])["reference_latents"][0].any()
    silent = WanHuMoImageToVideo.execute(COND, COND, VideoVAE(), 32, 16, 9, 1)
    assert options(silent[0])["audio_embed"].shape == (1, 4, 8, 5, 1280)
    assert not options(silent[0])["reference_latents"][0].any()
    with pytest.raises(ValueError, match=r"33 layers of width 1280.* found 2 of width 6"):
        WanHuMoImageToVideo.execute(
            COND, COND, VideoVAE(), 32, 16, 9, 1, audio_encoder_output=heard(2, 40)
        )


class CausalVAE(VideoVAE):
    """The first frame has a cell of its own."""

    def encode(self, pixels: Tensor) -> Tensor:
        padded = torch.cat([pixels[:1].expand(3, -1, -1, -1), pixels])
        grey = padded[: padded.shape[0] // 4 * 4].mean(dim=-1)[None, None]
        size = (grey.shape[2] // 4, pixels.shape[1] // 8, pixels.shape[2] // 8)
        whole = functional.adaptive_avg_pool3d(grey, size)
        return whole.expand(1, 16, -1, -1, -1).clone()


def wan_track(tracks: str, vae: Any = None, **changes: Any) -> Any:
    given = {
        "positive": COND, "negative": COND, "vae": vae or CausalVAE(), "tracks": tracks,
        "width": 64, "height": 32, "length": 9, "batch_size": 1, "temperature": 220.0, "topk": 2,
        "start_image": halves(),
    }  # fmt: skip
    return WanTrackToVideo.execute(**{**given, **changes})


def halves() -> Tensor:
    """A picture whose left quarter is white."""
    image = torch.zeros(1, 32, 64, 3)
    image[:, :, :16] = 1.0
    return image


def line(*xs: float) -> str:
    return str([{"x": x, "y": 16 + 16 / 3} for x in xs])  # in the middle of the third row


def test_features_go_along_a_track() -> None:
    places = [4.0] + [64.0] * 120
    values = options(wan_track(line(*places))[0])
    shown, mask = values["concat_latent_image"], values["concat_mask"]
    assert shown.shape == (1, 16, 3, 4, 8)
    assert mask.shape == (1, 4, 3, 4, 8)
    assert not mask[:, :, 0].any()
    # The place at the end takes the white features; the others stay grey.
    assert torch.allclose(shown[0, :, 1, 2, 7], torch.ones(16), atol=0.01)
    assert torch.allclose(shown[0, :, 1, :, 0], torch.full((16, 4), 0.5), atol=1e-4)
    assert mask[0, 0, 1, 2, 7] < 0.01 < 0.99 < mask[0, 0, 1, 0, 0]
    unseen = options(wan_track(line(4.0, 4.0))[0])  # it ends in the first of five frames
    assert unseen["concat_mask"][0, 0, 2].min() == 1.0


@pytest.mark.parametrize("length", [1, 2, 5, 81, 121, 122])
def test_tracks_fit_videos_of_every_length(length: int) -> None:
    cells = (length - 1) // 4 + 1
    values = options(wan_track(line(4.0, 5.0), length=length)[0])
    assert values["concat_latent_image"].shape == (1, 16, cells, 4, 8)
    assert torch.isfinite(values["concat_latent_image"]).all()


def test_every_video_of_a_batch_has_its_tracks() -> None:
    both = f"[[{line(*[0.0] * 121)}], [{line(*[4.0] + [64.0] * 120)}]]"
    mask = options(wan_track(both, batch_size=2)[0])["concat_mask"]
    assert mask.shape[0] == 2
    assert mask[0, 0, 1, 2, 0] < 0.99 < mask[1, 0, 1, 2, 0]


def test_without_tracks_the_picture_is_gone_on_from() -> None:
    values = options(wan_track("[]")[0])
    assert values["concat_mask"].shape == (1, 1, 3, 4, 8)


@pytest.mark.parametrize(
    "text",
    ["{", "3", '"x"', "[3]", "[[3]]", '[{"x": 1}]', '[{"x": NaN, "y": 1}]', "[" * 5000,
     '[{"x": 1, "y": 1e999}]', '[[[{"x": [], "y": 1}]]]', '[{"x": 1' + "0" * 400 + ', "y": 1}]'],
)  # fmt: skip
def test_texts_that_are_no_tracks_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"tracks: expected"):
        wan_track(text)


def moved(tracks: dict[str, Any] | None, strength: float = 1.0) -> Any:
    return WanMoveTrackToVideo.execute(
        COND, COND, CausalVAE(), 64, 32, 9, 1, strength, tracks, halves()
    )


def test_wan_move_puts_features_where_a_track_leads() -> None:
    path = torch.tensor([[4.0, 16.0]] + [[60.0, 20.0]] * 8)[:, None]
    made = moved({"track_path": path, "track_visibility": torch.ones(9, 1, dtype=torch.bool)})
    shown = options(made[0])["concat_latent_image"]
    plain = options(made[1])["concat_latent_image"]
    assert (plain[:, :, 1:] == 0.5).all()
    assert (shown[0, :, 1:, 2, 7] == 1.0).all()
    assert (shown != plain).sum() == 16 * 2
    half = options(moved({"track_path": path}, 0.5)[0])["concat_latent_image"]
    assert (half[0, :, 1:, 2, 7] == 0.75).all()
    assert options(made[0])["concat_mask"][0, 0, :, 0, 0].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("place", [(-5.0, 3.0), (64.0, 3.0), (3.0, 32.0)])
def test_wan_move_leaves_out_what_is_outside(place: tuple[float, float]) -> None:
    inside = (4.0, 16.0)
    for first, later in ((place, inside), (inside, place)):
        path = torch.tensor([first] + [later] * 8)[:, None]
        made = moved({"track_path": path})
        assert torch.equal(*(options(one)["concat_latent_image"] for one in (made[0], made[1])))
    for tracks, strength in ((None, 1.0), ({"track_path": torch.zeros(9, 1, 2)}, 0.0)):
        made = moved(tracks, strength)
        assert torch.equal(*(options(one)["concat_latent_image"] for one in (made[0], made[1])))


def test_tracks_are_drawn_on_the_video() -> None:
    path = torch.tensor([[2.0 + 4 * n, 8.0] for n in range(8)])[:, None]
    seen = torch.ones(8, 1, dtype=torch.bool)
    seen[7] = False
    tracks = {"track_path": path, "track_visibility": seen}
    image = torch.zeros(1, 16, 40, 4)
    drawn = WanMoveVisualizeTracks.execute(image, 24, 1, 1.0, 3, tracks)[0]
    assert drawn.shape == (8, 16, 40, 3)
    colour = torch.tensor([102, 153, 255]) / 255
    assert torch.allclose(drawn[0, 8, 2], colour, atol=0.01)
    assert torch.allclose(drawn[6, 8, 26], colour, atol=0.01)
    assert 0 < drawn[6, 8, 6, 2] < drawn[6, 8, 20, 2]
    assert not drawn[7].any()
    assert not WanMoveVisualizeTracks.execute(image, 24, 1, 0.0, 3, tracks)[0].any()
    assert WanMoveVisualizeTracks.execute(image, 24, 1, 1.0, 3)[0] is image
