"""Nodes that give video models pictures, videos and masks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from comfy import latent_formats
from comfy_extras import (
    nodes_cosmos,
    nodes_hunyuan,
    nodes_hunyuan3d,
    nodes_kandinsky5,
    nodes_lt,
    nodes_lumina2,
    nodes_qwen,
    nodes_wan,
)
from comfy_extras.wan.vace import WanVaceToVideo, mask_cells

COND = [[torch.zeros(1, 2, 3), {"kept": 1}]]


class VideoVAE:
    """The mean of the pixels of each cell, in as many channels as asked for."""

    def __init__(self, channels: int = 16, space: int = 8, time: int = 4) -> None:
        self.latent_channels, self.space, self.time = channels, space, time
        self.downscale_index_formula = (time, space, space)
        self.seen: list[Tensor] = []

    def spacial_compression_encode(self) -> int:
        return self.space

    def encode(self, pixels: Tensor) -> Tensor:
        self.seen.append(pixels)
        cells = (pixels.shape[0] - 1) // self.time + 1
        grey = pixels.mean(dim=-1)[None, None]
        whole = functional.adaptive_avg_pool3d(
            grey, (cells, pixels.shape[1] // self.space, pixels.shape[2] // self.space)
        )
        return whole.expand(1, self.latent_channels, -1, -1, -1).clone()


def options(conditioning: Any) -> dict[str, Any]:
    return conditioning[0][1]


def picture(value: float, count: int = 1, side: int = 16) -> Tensor:
    return torch.full((count, side, side, 3), value)


def test_wan_continues_a_picture_over_grey_frames() -> None:
    vae = VideoVAE()
    made = nodes_wan.WanImageToVideo.execute(COND, COND, vae, 32, 16, 9, 2, picture(1.0, 2))
    video = vae.seen[0]
    assert video.shape == (9, 16, 32, 3)
    assert video[:2].min() == 1.0
    assert torch.equal(video[2:], torch.full_like(video[2:], 0.5))
    assert made[2]["samples"].shape == (2, 16, 3, 2, 4)
    mask = options(made[0])["concat_mask"]
    assert mask.shape == (1, 1, 3, 2, 4)
    assert mask[0, 0, :, 0, 0].tolist() == [0.0, 1.0, 1.0]
    assert options(made[1])["concat_latent_image"] is options(made[0])["concat_latent_image"]
    assert options(COND) == {"kept": 1}


def test_without_a_picture_only_the_latent_is_made() -> None:
    made = nodes_wan.WanImageToVideo.execute(COND, COND, VideoVAE(), 32, 16, 9, 1)
    assert options(made[0]) == {"kept": 1}


def test_wan_leads_from_one_picture_to_another() -> None:
    vae = VideoVAE()
    seen = SimpleNamespace(penultimate_hidden_states=torch.ones(1, 3, 4))
    made = nodes_wan.WanFirstLastFrameToVideo.execute(
        COND, COND, vae, 16, 16, 9, 1, picture(1.0), picture(0.0, 2), seen, seen
    )
    video = vae.seen[0][:, 0, 0, 0]
    assert video.tolist() == [1.0] + [0.5] * 6 + [0.0, 0.0]
    mask = options(made[0])["concat_mask"]
    assert mask.shape == (1, 4, 3, 2, 2)
    # Time runs over the channels first: the first frame fills its whole cell.
    frames = mask[0, :, :, 0, 0].transpose(0, 1).flatten().tolist()
    assert frames == [0.0] * 4 + [1.0] * 6 + [0.0] * 2
    joined = options(made[0])["clip_vision_output"]
    assert joined.penultimate_hidden_states.shape == (1, 6, 4)
    alone = nodes_wan.WanFunInpaintToVideo.execute(
        COND, COND, vae, 16, 16, 9, 1, picture(1.0), None, seen
    )
    assert options(alone[0])["clip_vision_output"] is seen


def test_wan_follows_a_control_video() -> None:
    made = nodes_wan.WanFunControlToVideo.execute(
        COND, COND, VideoVAE(), 16, 16, 9, 1, None, None, picture(0.25, 20)
    )
    shown = options(made[0])["concat_latent_image"]
    assert shown.shape == (1, 32, 3, 2, 2)
    assert torch.allclose(shown[:, :16], torch.tensor(0.25))
    neutral = latent_formats.Wan21().process_out(torch.zeros(1, 16, 3, 2, 2))
    assert torch.allclose(shown[:, 16:], neutral)


@pytest.mark.parametrize(("channels", "space"), [(16, 8), (48, 16)])
def test_wan_22_takes_a_reference_beside_the_control(channels: int, space: int) -> None:
    made = nodes_wan.Wan22FunControlToVideo.execute(
        COND, COND, VideoVAE(channels, space), 32, 32, 5, 1, ref_image=picture(1.0, 3)
    )
    values = options(made[0])
    side = 32 // space
    assert values["concat_latent_image"].shape == (1, 2 * channels, 2, side, side)
    assert values["concat_mask_index"] == channels
    assert values["reference_latents"][0].shape == (1, channels, 1, side, side)
    assert made[2]["samples"].shape == (1, channels, 2, side, side)


def test_a_camera_rides_along() -> None:
    made = nodes_wan.WanCameraImageToVideo.execute(
        COND, COND, VideoVAE(), 16, 16, 5, 1, picture(1.0), None, "camera"
    )
    values = options(made[0])
    assert values["camera_conditions"] == "camera"
    assert values["concat_latent_image"][0, 0, 0].mean() == 1.0
    assert values["concat_mask"][0, :, 0].sum() == 0


def test_subjects_lie_beside_the_text_and_are_left_out_of_the_second_negative() -> None:
    made = nodes_wan.WanPhantomSubjectToVideo.execute(
        COND, COND, VideoVAE(), 16, 16, 9, 1, picture(1.0, 3)
    )
    shown = options(made[0])["time_dim_concat"]
    assert shown.shape == (1, 16, 3, 2, 2)
    assert torch.equal(options(made[1])["time_dim_concat"], shown)
    assert not torch.equal(options(made[2])["time_dim_concat"], shown)
    assert made[3]["samples"].shape == (1, 16, 3, 2, 2)


def test_cells_are_taken_off_the_beginning() -> None:
    samples = torch.arange(4.0).reshape(1, 1, 4, 1, 1)
    trimmed = nodes_wan.TrimVideoLatent.execute({"samples": samples, "kept": 1}, 3)[0]
    assert trimmed["samples"].flatten().tolist() == [3.0]
    assert trimmed["kept"] == 1


def test_the_small_22_model_begins_with_given_cells() -> None:
    vae = VideoVAE(48, 16)
    made = nodes_wan.Wan22ImageToVideoLatent.execute(vae, 32, 32, 9, 2, picture(1.0, 5, 32))[0]
    assert made["samples"].shape == (2, 48, 3, 2, 2)
    assert made["noise_mask"][0, 0, :, 0, 0].tolist() == [0.0, 0.0, 1.0]
    assert torch.allclose(made["samples"][:, :, :2], torch.tensor(1.0))
    neutral = latent_formats.Wan22().process_out(torch.zeros(1, 48, 1, 2, 2))
    assert torch.allclose(made["samples"][:1, :, 2:], neutral)


def test_vace_parts_the_video_by_the_mask() -> None:
    vae = VideoVAE()
    mask = torch.zeros(1, 16, 16)
    mask[:, :, 8:] = 1.0
    made = WanVaceToVideo.execute(
        COND, COND, vae, 16, 16, 5, 1, 0.7, picture(1.0, 5), mask, picture(0.25)
    )
    kept, anew = vae.seen[0], vae.seen[1]
    assert kept[0, 0, 0, 0] == 1.0
    assert kept[0, 0, 15, 0] == 0.5
    assert anew[0, 0, 0, 0] == 0.5
    assert anew[0, 0, 15, 0] == 1.0
    assert kept[4, 0, 0, 0] == 0.5  # frames without a mask are made anew
    values = options(made[0])
    frames = values["vace_frames"][0]
    assert frames.shape == (1, 32, 3, 2, 2)  # one cell more, for the reference
    assert torch.allclose(frames[:, :16, 0], torch.tensor(0.25))
    assert values["vace_mask"][0].shape == (1, 64, 3, 2, 2)
    assert values["vace_mask"][0][0, :, 0].sum() == 0
    assert values["vace_strength"] == [0.7]
    assert made[2]["samples"].shape == (1, 16, 3, 2, 2)
    assert made[3] == 1
    twice = WanVaceToVideo.execute(made[0], made[1], vae, 16, 16, 5, 1, 0.2)
    assert options(twice[0])["vace_strength"] == [0.7, 0.2]


def test_a_mask_has_a_channel_for_each_pixel_of_a_cell() -> None:
    mask = torch.rand(5, 16, 24, 1)
    cells = mask_cells(mask, 5)
    assert cells.shape == (64, 5, 2, 3)
    assert cells[8 * 3 + 5, 2, 1, 2] == mask[2, 8 + 3, 16 + 5, 0]


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("v1 (concat)", "concat_latent_image"),
        ("v2 (replace)", "guiding_frame_index"),
        ("custom", "ref_latent"),
    ],
)
def test_hunyuan_is_shown_a_picture_in_its_own_way(kind: str, key: str) -> None:
    made = nodes_hunyuan.HunyuanImageToVideo.execute(
        COND, VideoVAE(), 16, 16, 9, 1, kind, picture(1.0)
    )
    assert key in options(made[0])
    replaced = kind == "v2 (replace)"
    assert ("noise_mask" in made[1]) is replaced
    assert bool(made[1]["samples"][:, :, 0].any()) is replaced
    assert not made[1]["samples"][:, :, 1:].any()


def test_hunyuan_15_is_shown_pictures_and_small_videos() -> None:
    vae = VideoVAE(32, 16)
    made = nodes_hunyuan.HunyuanVideo15ImageToVideo.execute(
        COND, COND, vae, 32, 32, 9, 1, picture(1.0, 1, 32), "seen"
    )
    values = options(made[0])
    assert values["clip_vision_output"] == "seen"
    assert values["concat_latent_image"][:, :, 0].min() == 1.0
    assert values["concat_mask"][0, 0, :, 0, 0].tolist() == [0.0, 1.0, 1.0]
    small = {"samples": torch.full((1, 32, 3, 2, 2), 0.5)}
    large = nodes_hunyuan.HunyuanVideo15SuperResolution.execute(
        COND, COND, small, 0.7, vae, picture(1.0, 1, 32)
    )
    shown = options(large[0])["concat_latent_image"]
    assert shown.shape == (1, 66, 3, 2, 2)
    assert torch.equal(shown[:, 33:65], small["samples"])
    with pytest.raises(ValueError, match="needs a vae"):
        nodes_hunyuan.HunyuanVideo15SuperResolution.execute(
            COND, COND, small, 0.7, None, picture(1.0)
        )
    with pytest.raises(ValueError, match=r"vae: expected .* cells of 16 pixels, found one of 4"):
        nodes_hunyuan.HunyuanVideo15SuperResolution.execute(
            COND, COND, small, 0.7, VideoVAE(32, 4, 8), picture(1.0)
        )
    refined = nodes_hunyuan.HunyuanRefinerLatent.execute(COND, COND, small, 0.1)
    assert options(refined[1])["concat_latent_image"] is small["samples"]
    assert not refined[2]["samples"].any()


def test_cosmos_keeps_first_and_last_frames() -> None:
    vae = VideoVAE(16, 8, 8)
    made = nodes_cosmos.CosmosImageToVideoLatent.execute(
        vae, 16, 16, 25, 2, picture(1.0), picture(0.25)
    )[0]
    assert made["samples"].shape == (2, 16, 4, 2, 2)
    assert made["noise_mask"][0, 0, :, 0, 0].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert vae.seen[0].shape[0] == 9  # grey frames behind the first, so that it is no end
    assert vae.seen[1].shape[0] == 1
    later = nodes_cosmos.CosmosPredict2ImageToVideoLatent.execute(
        VideoVAE(), 16, 16, 9, 1, picture(1.0)
    )[0]
    neutral = latent_formats.Wan21().process_out(torch.zeros(1, 16, 1, 2, 2))
    assert torch.allclose(later["samples"][:, :, 1:2], neutral)
    assert "noise_mask" not in nodes_cosmos.CosmosImageToVideoLatent.execute(vae, 16, 16, 9, 1)[0]


def test_kandinsky_replaces_the_first_cells_and_evens_them_out() -> None:
    made = nodes_kandinsky5.Kandinsky5ImageToVideo.execute(
        COND, COND, VideoVAE(), 16, 16, 9, 1, picture(1.0)
    )
    assert options(made[0])["time_dim_replace"] is made[3]["samples"]
    samples = torch.randn(1, 4, 6, 8, 8)
    samples[:, :, :2] = samples[:, :, :2] * 3 + 5
    latent = {"samples": samples.clone()}
    even = nodes_kandinsky5.NormalizeVideoLatentStart.execute(latent, 2, 3)[0]["samples"]
    assert torch.equal(even[:, :, 2:], samples[:, :, 2:])
    assert samples[:, :, 0].mean() - even[:, :, 0].mean() == pytest.approx(0.3, abs=1e-3)
    assert torch.equal(latent["samples"], samples)


def test_ltx_latents_begin_with_a_picture() -> None:
    vae = VideoVAE(128, 32, 8)
    image = picture(1.0, 1, 64)
    made = nodes_lt.LTXVImgToVideo.execute(COND, COND, image, vae, 64, 64, 17, 1, 0.75)[2]
    assert made["samples"][:, :, 0].min() == 1.0
    assert made["noise_mask"].flatten().tolist() == [0.25, 1.0, 1.0]
    put = nodes_lt.LTXVImgToVideoInplace.execute(vae, image, made, 1.0)[0]
    assert put["noise_mask"].flatten().tolist() == [0.0, 1.0, 1.0]
    assert made["noise_mask"].flatten().tolist() == [0.25, 1.0, 1.0]
    assert nodes_lt.LTXVImgToVideoInplace.execute(vae, image, made, 1.0, True)[0] is made


def test_pictures_and_sound_are_joined_and_parted() -> None:
    video = {"samples": torch.zeros(1, 4, 2, 2, 2), "noise_mask": torch.zeros(1, 1, 2, 1, 1)}
    audio = {"samples": torch.ones(1, 8, 5)}
    joined = nodes_lt.LTXVConcatAVLatent.execute(video, audio)[0]
    parts = nodes_lt.LTXVSeparateAVLatent.execute(joined)
    assert torch.equal(parts[0]["samples"], video["samples"])
    assert torch.equal(parts[1]["samples"], audio["samples"])
    assert torch.equal(parts[0]["noise_mask"], video["noise_mask"])
    assert parts[1]["noise_mask"].min() == 1.0


def test_compression_loses_more_the_more_is_asked() -> None:
    image = torch.rand(1, 33, 48, 3, generator=torch.Generator().manual_seed(1))
    run = nodes_lt.LTXVPreprocess.execute
    assert torch.equal(run(image, 0)[0], image)
    losses = [(run(image, amount)[0] - image[:, :32]).abs().mean() for amount in (10, 45)]
    assert losses[0] < losses[1]


def test_lumina_texts_begin_as_the_model_was_taught() -> None:
    clip = SimpleNamespace(
        tokenize=lambda text: text, encode_from_tokens_scheduled=lambda tokens: tokens
    )
    text = nodes_lumina2.CLIPTextEncodeLumina2.execute(clip, "a cat", "superior")[0]
    assert text.endswith(" <Prompt Start> a cat")
    assert "superior" in text


def test_qwen_sees_the_picture_to_edit_at_its_size() -> None:
    seen: dict[str, Any] = {}

    def tokenize(text: str, images: list[Tensor]) -> str:
        seen["images"] = images
        return text

    clip = SimpleNamespace(
        tokenize=tokenize, encode_from_tokens_scheduled=lambda tokens: [[tokens, {}]]
    )
    vae = SimpleNamespace(encode=lambda pixels: pixels.shape)
    made = nodes_qwen.TextEncodeQwenImageEdit.execute(clip, "red", vae, torch.rand(1, 50, 200, 4))[
        0
    ]
    assert seen["images"][0].shape == (1, 512, 2048, 3)
    assert made[0][1]["reference_latents"] == [(1, 512, 2048, 3)]
    alone = nodes_qwen.TextEncodeQwenImageEdit.execute(clip, "red")[0]
    assert seen["images"] == []
    assert alone[0][1] == {}


def test_shapes_are_made_from_one_or_several_sides() -> None:
    seen = SimpleNamespace(last_hidden_state=torch.zeros(1, 3, 8))
    single = nodes_hunyuan3d.Hunyuan3Dv2Conditioning.execute(seen)
    assert single[0][0][0] is seen.last_hidden_state
    sides = nodes_hunyuan3d.Hunyuan3Dv2ConditioningMultiView.execute(front=seen, back=seen)
    states = sides[0][0][0]
    assert states.shape == (1, 6, 8)
    assert torch.allclose(states[0, 0], torch.tensor([0.0] * 4 + [1.0] * 4))
    assert states[0, 3, 0] == pytest.approx(torch.sin(torch.tensor(2.0)).item())
    with pytest.raises(ValueError, match="at least one"):
        nodes_hunyuan3d.Hunyuan3Dv2ConditioningMultiView.execute()


def test_two_texts_reach_two_encoders() -> None:
    clip = SimpleNamespace(
        tokenize=lambda text: dict.fromkeys(("l", "hydit_clip", "mt5xl", "qwen25_7b"), text),
        encode_from_tokens_scheduled=lambda tokens: tokens,
    )
    tokens = nodes_hunyuan.CLIPTextEncodeHunyuanDiT.execute(clip, "a", "b")[0]
    assert (tokens["hydit_clip"], tokens["mt5xl"]) == ("a", "b")
    tokens = nodes_kandinsky5.CLIPTextEncodeKandinsky5.execute(clip, "a", "b")[0]
    assert (tokens["l"], tokens["qwen25_7b"]) == ("a", "b")
