"""Guides of LTX video, the sound's latent, and texts that are read beside pictures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_extras.nodes_hunyuan import TextEncodeHunyuanVideo_ImageToVideo
from comfy_extras.nodes_lt import LTXVAddGuide, LTXVCropGuides, SymmetricPatchifier
from comfy_extras.nodes_lt_audio import LTXVEmptyLatentAudio
from comfy_extras.nodes_qwen import TextEncodeQwenImageEditPlus
from tests.comfy_extras.test_video_conditioning import COND, VideoVAE, options, picture

VAE = VideoVAE(128, 32, 8)


def latent(cells: int = 4) -> dict[str, Any]:
    return {"samples": torch.zeros(1, 128, cells, 2, 3), "kept": 1}


def guided(frame: int, frames: int = 1, strength: float = 1.0, start: Any = None) -> Any:
    positive, negative, video = start or (COND, COND, latent())
    return LTXVAddGuide.execute(
        positive, negative, VAE, video, picture(1.0, frames), frame, strength
    )


def places(made: Any) -> torch.Tensor:
    return options(made[0])["keyframe_idxs"]


def test_a_guide_lies_behind_the_video_and_says_where_it_belongs() -> None:
    made = guided(9, strength=0.75)
    video = made[2]
    assert video["samples"].shape == (1, 128, 5, 2, 3)
    assert video["samples"][:, :, 4].min() == 1.0
    assert not video["samples"][:, :, :4].any()
    assert video["noise_mask"].flatten().tolist() == [1.0] * 4 + [0.25]
    assert video["kept"] == 1
    # Both ends of each of the 2 x 3 tokens, in frames, rows and columns.
    assert places(made).shape == (1, 3, 6, 2)
    assert places(made)[0, :, 0].tolist() == [[9, 17], [0, 32], [0, 32]]
    assert places(made)[0, :, 5].tolist() == [[9, 17], [32, 64], [64, 96]]
    assert torch.equal(options(made[1])["keyframe_idxs"], places(made))
    assert options(COND) == {"kept": 1}


@pytest.mark.parametrize(
    ("frame", "frames", "begins"),
    [
        (0, 1, [0]),
        (0, 9, [0, 1]),
        (1, 9, [1, 9]),
        (8, 9, [1, 9]),  # down to where a cell begins
        (9, 9, [9, 17]),
        (9, 16, [9, 17]),  # frames beyond whole cells are left out
        (-1, 1, [24]),
        (-9, 1, [16]),
        (-100, 1, [0]),
        (5, 1, [5]),
    ],
)
def test_guides_begin_where_cells_do(frame: int, frames: int, begins: list[int]) -> None:
    found = places(guided(frame, frames))[0, 0, :, 0].unique().tolist()
    assert found == begins


def test_several_guides_follow_each_other_and_are_cut_off_together() -> None:
    first = guided(0)
    second = guided(-1, start=tuple(first[n] for n in range(3)))
    assert second[2]["samples"].shape[2] == 6
    assert places(second).shape == (1, 3, 12, 2)
    assert places(second)[0, 0, :, 0].unique().tolist() == [0, 24]
    cut = LTXVCropGuides.execute(second[0], second[1], second[2])
    assert cut[2]["samples"].shape[2] == 4
    assert cut[2]["noise_mask"].shape[2] == 4
    assert options(cut[0])["keyframe_idxs"] is None
    assert options(second[0])["keyframe_idxs"] is not None
    again = LTXVCropGuides.execute(cut[0], cut[1], cut[2])
    assert again[2]["samples"].shape[2] == 4
    with pytest.raises(ValueError, match="latent: expected more than the 2 cells"):
        LTXVCropGuides.execute(second[0], second[1], latent(2))


@pytest.mark.parametrize(("frame", "frames"), [(17, 17), (25, 9), (26, 1), (0, 33)])
def test_a_guide_beyond_the_end_is_refused(frame: int, frames: int) -> None:
    with pytest.raises(ValueError, match=r"frame_idx: expected .* within the video's 24 \+ 1"):
        guided(frame, frames)


def test_guides_keep_masks_and_batches() -> None:
    video = {"samples": torch.zeros(2, 128, 4, 2, 3)}
    for mask in (
        torch.zeros(1, 1, 16, 24),
        torch.zeros(4, 1, 16, 24),
        torch.zeros(1, 1, 1, 16, 24),
    ):
        made = guided(0, start=(COND, COND, {**video, "noise_mask": mask}), strength=0.5)
        assert made[2]["samples"].shape == (2, 128, 5, 2, 3)
        assert made[2]["noise_mask"].shape == (2, 1, 5, 16, 24)
        assert made[2]["noise_mask"][0, 0, :, 0, 0].tolist() == [0.0] * 4 + [0.5]
    with pytest.raises(ValueError, match="latent: expected a noise mask for each of its 4 cells"):
        guided(0, start=(COND, COND, {**video, "noise_mask": torch.zeros(3, 1, 16, 24)}))
    other = {"samples": torch.zeros(1, 16, 4, 2, 3)}
    with pytest.raises(ValueError, match="latent: expected a video latent of 128 channels"):
        guided(0, start=(COND, COND, other))
    with pytest.raises(ValueError, match="latent: expected a latent of a video"):
        guided(0, start=(COND, COND, {"samples": torch.zeros(1, 4, 8, 8)}))


def test_a_guide_may_have_a_mask_of_its_own() -> None:
    video, guide = torch.zeros(1, 128, 4, 2, 3), torch.ones(1, 128, 1, 2, 3)
    own = torch.tensor([1.0, 0.5, 1.0] * 2).reshape(1, 1, 1, 2, 3)
    made = LTXVAddGuide.append_keyframe(
        COND, COND, 0, video, torch.ones(1, 1, 4, 1, 1), guide, 0.5, (8, 32, 32), guide_mask=own
    )
    assert made[3].shape == (1, 1, 5, 2, 3)
    assert made[3][0, 0, 4, 0].tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("patch", [1, 2])
def test_patches_go_back_to_their_places(patch: int) -> None:
    cutter = SymmetricPatchifier(patch)
    video = torch.arange(2 * 3 * 2 * 4 * 6.0).reshape(2, 3, 2, 4, 6)
    tokens, coords = cutter.patchify(video)
    assert tokens.shape == (2, 48 // patch**2, 3 * patch**2)
    assert coords.shape == (2, 3, 48 // patch**2)
    assert coords[0, :, -1].tolist() == [1, 4 - patch, 6 - patch]
    assert torch.equal(cutter.unpatchify(tokens, 4, 6, 2, 3), video)


def test_sound_lasts_as_long_as_the_frames() -> None:
    vae = SimpleNamespace(
        latent_channels=8,
        latent_frequency_bins=16,
        sample_rate=16000,
        num_of_latents_from_frames=lambda frames, rate: -(-frames * 25 // rate),
    )
    made = LTXVEmptyLatentAudio.execute(97, 24, 2, vae)[0]
    assert made["samples"].shape == (2, 8, 102, 16)
    assert (made["type"], made["sample_rate"]) == ("audio", 16000)
    with pytest.raises(ValueError, match="audio_vae: expected the sound autoencoder"):
        LTXVEmptyLatentAudio.execute(97, 24, 2, VAE)


class Reader:
    """Keeps what it is asked to read."""

    def tokenize(self, text: str, **kwargs: Any) -> str:
        self.text, self.kwargs = text, kwargs
        return text

    def encode_from_tokens_scheduled(self, tokens: str) -> Any:
        return [[tokens, {}]]


def test_qwen_numbers_the_pictures_it_is_shown() -> None:
    reader = Reader()
    vae = SimpleNamespace(encode=lambda pixels: tuple(pixels.shape))
    made = TextEncodeQwenImageEditPlus.execute(
        reader, "join them", vae, torch.rand(1, 50, 200, 4), None, torch.rand(1, 1, 3000, 3)
    )[0]
    vision = "<|vision_start|><|image_pad|><|vision_end|>"
    assert reader.text == f"Picture 1: {vision}Picture 3: {vision}join them"
    assert [one.shape for one in reader.kwargs["images"]] == [(1, 192, 768, 3), (1, 7, 21033, 3)]
    assert reader.kwargs["llama_template"].count("{}") == 1
    assert options(made)["reference_latents"] == [(1, 512, 2048, 3), (1, 16, 56088, 3)]
    alone = TextEncodeQwenImageEditPlus.execute(reader, "red")[0]
    assert reader.kwargs["images"] == []
    assert options(alone) == {}


def test_hunyuan_reads_beside_a_picture() -> None:
    reader, seen = Reader(), SimpleNamespace(mm_projected=torch.zeros(1, 5, 7))
    TextEncodeHunyuanVideo_ImageToVideo.execute(reader, seen, "runs", 3)
    assert reader.kwargs["image_embeds"] is seen.mm_projected
    assert reader.kwargs["image_interleave"] == 3
    assert reader.kwargs["llama_template"].count("{}") == 1
    with pytest.raises(ValueError, match="clip_vision_output: expected"):
        TextEncodeHunyuanVideo_ImageToVideo.execute(reader, SimpleNamespace(), "runs", 3)
