"""Tiles of a video in time fall on the latent frames of the whole video, whatever their sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from comfy.vae.vae import VAE
from comfy_nodes.vae import VAEDecodeTiled, VAEEncodeTiled
from tests.support.golden_nets import read_golden_net

TIME, SPACE = 4, 8


@pytest.fixture(scope="module")
def clock(golden_folder: Path) -> VAE:
    """An autoencoder of Wan videos whose network tells the time: a latent frame is the mean of the
    four frames that it describes, the first one of a piece that of one."""
    vae = VAE(sd=dict(read_golden_net(golden_folder / "nets/wan21_vae.safetensors").weights))

    def encode(video: Tensor) -> Tensor:
        times = video[:, :1, :, ::SPACE, ::SPACE]
        later = times[:, :, 1 : 1 + (times.shape[2] - 1) // TIME * TIME]
        means = later.unflatten(2, (-1, TIME)).mean(dim=3)
        return torch.cat([times[:, :, :1], means], dim=2).repeat(1, vae.latent_channels, 1, 1, 1)

    def decode(latent: Tensor) -> Tensor:
        first, later = latent[:, :1, :1], latent[:, :1, 1:]
        offsets = torch.arange(TIME) - (TIME - 1) / 2
        frames = (later[:, :, :, None] + offsets.view(-1, 1, 1)).flatten(2, 3)
        video = torch.cat([first, frames], dim=2).repeat(1, 3, 1, 1, 1)
        return video.repeat_interleave(SPACE, 3).repeat_interleave(SPACE, 4)

    vae.first_stage_model.encode, vae.first_stage_model.decode = encode, decode
    vae.process_input = vae.process_output = lambda x: x
    return vae


@torch.inference_mode()
def test_encoding_in_tiles_of_time_keeps_the_time(clock: VAE) -> None:
    for frames in (1, 2, 5, 16, 33, 34, 49, 80, 121):
        video = torch.arange(frames, dtype=torch.float32).view(-1, 1, 1, 1).repeat(1, 8, 16, 3)
        whole = clock.encode(video)
        for size, overlap in ((8, 4), (8, 8), (16, 8), (20, 16), (32, 8), (64, 8), (64, 200)):
            made = VAEEncodeTiled().encode(clock, video, 512, 64, size, overlap)[0]["samples"]
            assert made.shape == whole.shape, (frames, size, overlap)
            # The frame that a tile begins with is alone: 1.5 before the mean of its four.
            places = ((made - whole)[0, 0, :, 0, 0].abs() > 1e-4).nonzero().flatten().tolist()
            tile = (size + 3) // TIME
            step = tile - min((overlap + 3) // TIME, tile - 1)
            assert all(place % step == 0 for place in places), (frames, size, overlap, places)
            assert (made - whole).abs().max() < 1.5


@torch.inference_mode()
def test_decoding_in_tiles_of_time_keeps_the_time(clock: VAE) -> None:
    for count in (1, 2, 5, 9, 21):
        # Of frames 1 2 3 4 the latent is 2.5, of the first one 0.
        latent = (torch.arange(count) * TIME - 1.5).clamp(min=0).view(1, 1, -1, 1, 1)
        latent = latent.repeat(1, clock.latent_channels, 1, 2, 2)
        frames = torch.arange((count - 1) * TIME + 1, dtype=torch.float32).view(-1, 1, 1, 1)
        for size, overlap in ((8, 4), (16, 8), (32, 8), (64, 8), (12, 8)):
            (made,) = VAEDecodeTiled().decode(clock, {"samples": latent}, 512, 64, size, overlap)
            assert made.shape == (len(frames), 2 * SPACE, 2 * SPACE, 3)
            # A tile begins with one frame, at the end of the four that its latent describes.
            assert (made - frames).abs().max() < 1.51, (count, size, overlap)


@pytest.mark.parametrize(
    ("size", "overlap", "expected"),
    [(64, 8, (16, 2)), (64, 40, (16, 5)), (64, 4096, (16, 8)), (8, 8, (2, 1)), (16, 12, (4, 1))],
)
def test_an_overlap_in_time_of_more_than_half_a_tile_is_halved(
    size: int, overlap: int, expected: tuple[int, int], clock: VAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(latent: Tensor, tile_t: int, overlap_t: int, **others: int) -> Tensor:
        assert (tile_t, overlap_t) == expected
        return latent.movedim(1, -1)

    monkeypatch.setattr(clock, "decode_tiled", note)
    latent = {"samples": torch.zeros(1, clock.latent_channels, 3, 2, 2)}
    VAEDecodeTiled().decode(clock, latent, 512, 64, size, overlap)
