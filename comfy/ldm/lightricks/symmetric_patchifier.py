"""Video latents as tokens, and the place of every token in the latent and in the video.

Source: HaCohen et al. 2024, https://arxiv.org/abs/2501.00103, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor


class SymmetricPatchifier:
    """Cuts latents into patches of one cell in time and `patch_size` cells along each side.

    Args:
        patch_size: Cells of a side.
        start_end: Give both ends of a patch's place, not its beginning only.
    """

    def __init__(self, patch_size: int, start_end: bool = False) -> None:
        self._patch_size = (1, patch_size, patch_size)
        self.start_end = start_end

    @property
    def patch_size(self) -> tuple[int, int, int]:
        """Cells of a patch in time, height and width."""
        return self._patch_size

    def get_latent_coords(
        self,
        latent_num_frames: int,
        latent_height: int,
        latent_width: int,
        batch_size: int,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Places of patches in cells [B, 3, N], or [B, 3, N, 2] with both ends."""
        sizes = (latent_num_frames, latent_height, latent_width)
        axes = [
            torch.arange(0, size, step, device=device) for size, step in zip(sizes, self.patch_size)
        ]
        starts = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
        if self.start_end:
            steps = torch.tensor(self.patch_size, device=device)[:, None]
            starts = torch.stack([starts, starts + steps], dim=-1)
        return starts.expand(batch_size, *starts.shape).clone()

    def patchify(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, N, C * patch] of latents [B, C, T, H, W], and their places."""
        batch, _, cells, rows, columns = latents.shape
        coords = self.get_latent_coords(cells, rows, columns, batch, latents.device)
        t, h, w = self.patch_size
        tokens = rearrange(latents, "b c (f t) (y h) (x w) -> b (f y x) (c t h w)", t=t, h=h, w=w)
        return tokens, coords

    def unpatchify(
        self,
        latents: Tensor,
        output_height: int,
        output_width: int,
        output_num_frames: int,
        out_channels: int,
    ) -> Tensor:
        """Latents [B, C, T, H, W] of tokens [B, N, C * patch]; sizes are in cells."""
        t, h, w = self.patch_size
        return rearrange(
            latents,
            "b (f y x) (c t h w) -> b c (f t) (y h) (x w)",
            c=out_channels,
            f=output_num_frames // t,
            y=output_height // h,
            x=output_width // w,
            t=t,
            h=h,
            w=w,
        )


def latent_to_pixel_coords(
    latent_coords: Tensor, scale_factors: Sequence[int], causal_fix: bool = False
) -> Tensor:
    """Places in frames and pixels of places in cells [B, 3, N] or [B, 3, N, 2].

    Args:
        scale_factors: Frames, rows and columns that share a cell.
        causal_fix: The first cell holds one frame only, so all later ones come earlier.
    """
    factors = torch.tensor(scale_factors, device=latent_coords.device)
    places = latent_coords * factors.reshape(1, 3, *(1,) * (latent_coords.ndim - 2))
    if causal_fix:
        places[:, 0] = (places[:, 0] + 1 - scale_factors[0]).clamp(min=0)
    return places
