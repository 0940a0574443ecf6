"""Guides of LTX video: pictures or clips that the video is to show at some frame.

A guide's latent is put behind those of the video, and the conditioning says where its tokens
belong: `keyframe_idxs` [B, 3, tokens, 2] holds both ends of each token's frame, row and column.
After sampling the guides are cut off again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy import resize
from comfy.ldm.lightricks.symmetric_patchifier import SymmetricPatchifier, latent_to_pixel_coords
from comfy_api.latest import io
from comfy_extras.declarations import pair_and_latent_outputs, pair_inputs
from comfy_extras.video_frames import Conditioning, encoded_frames, with_values
from comfy_nodes.latent_basics import VIDEO, samples_of

Latent = dict[str, Any]
Scales = tuple[int, int, int]  # frames, rows and columns that share a cell
CHANNELS = 128
SCALES: Scales = (8, 32, 32)
KEY = "keyframe_idxs"


def get_noise_mask(latent: Latent) -> Tensor:
    """A copy of a latent's noise mask [B, 1, T, H, W]; ones where it has none.

    Raises:
        ValueError: It is the mask of a video of another length.
    """
    samples: Tensor = latent["samples"]
    cells, mask = samples.shape[2], latent.get("noise_mask")
    if mask is None:
        return samples.new_ones(samples.shape[0], 1, cells, 1, 1)
    if mask.ndim == 4:  # [frames, 1, H, W], as masks are set on latents
        mask = mask.transpose(0, 1)[None]
    if mask.ndim != 5 or mask.shape[2] not in (1, cells):
        raise ValueError(
            f"latent: expected a noise mask for each of its {cells} cells in time, or one for all, "
            f"found one of shape {tuple(latent['noise_mask'].shape)}"
        )
    return mask.expand(-1, -1, cells, -1, -1).clone()


def get_keyframe_idxs(cond: Conditioning) -> tuple[Tensor | None, int]:
    """Places of the guides' tokens, and the number of cells in time that guides take."""
    places = next((entry[1][KEY] for entry in cond if entry[1].get(KEY) is not None), None)
    if places is None:
        return None, 0
    begins = places[:, 0, :, 0] if places.ndim == 4 else places[:, 0]
    return places, torch.unique(begins).shape[0]


class LTXVAddGuide(io.ComfyNode):
    """Asks the model to show a picture or clip at some frame."""

    PATCHIFIER = SymmetricPatchifier(1, start_end=True)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVAddGuide",
            category="conditioning/video_models",
            inputs=[
                *pair_inputs(),
                io.Vae.Input("vae"),
                io.Latent.Input("latent"),
                io.Image.Input(
                    "image",
                    tooltip="One picture, or a clip; of a clip 8 * n + 1 frames are used.",
                ),
                io.Int.Input(
                    "frame_idx",
                    default=0,
                    min=-9999,
                    max=9999,
                    tooltip="Frame at which the guide begins; negative ones count from the end. "
                    "A clip begins at frame 0 or at one of 8 * n + 1; others are rounded down.",
                ),
                io.Float.Input("strength", default=1.0, min=0.0, max=1.0, step=0.01),
            ],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def encode(
        cls, vae: Any, latent_width: int, latent_height: int, images: Tensor, scale_factors: Scales
    ) -> tuple[Tensor, Tensor]:
        """The frames that are used, at the video's size, and their latent."""
        time, rows, columns = scale_factors
        count = (images.shape[0] - 1) // time * time + 1
        pixels = images[:count, ..., :3].movedim(-1, 1)
        size = (latent_width * columns, latent_height * rows)
        frames = resize.common_upscale(pixels, *size, "bilinear", "disabled").movedim(1, -1)
        return frames, encoded_frames(vae, frames, CHANNELS)

    @classmethod
    def get_latent_index(
        cls,
        cond: Conditioning,
        latent_length: int,
        guide_length: int,
        frame_idx: int,
        scale_factors: Scales,
    ) -> tuple[int, int]:
        """The frame and the cell at which a guide begins.

        Args:
            latent_length: Cells of the latent in time, with those of earlier guides.
            guide_length: Frames of the guide.
            frame_idx: Frame that is asked for; negative ones count from the end.
        """
        time = scale_factors[0]
        cells = latent_length - get_keyframe_idxs(cond)[1]
        if frame_idx < 0:
            frame_idx = max((cells - 1) * time + 1 + frame_idx, 0)
        if guide_length > 1 and frame_idx != 0:
            frame_idx = (frame_idx - 1) // time * time + 1  # where a cell begins
        return frame_idx, -(-frame_idx // time)

    @classmethod
    def add_keyframe_index(
        cls, cond: Conditioning, frame_idx: int, guiding_latent: Tensor, scale_factors: Scales
    ) -> Conditioning:
        """A conditioning that knows where a further guide's tokens belong."""
        earlier, _ = get_keyframe_idxs(cond)
        _, cells = cls.PATCHIFIER.patchify(guiding_latent)
        # Only at the video's very beginning does the guide's first cell hold a single frame.
        places = latent_to_pixel_coords(cells, scale_factors, causal_fix=frame_idx == 0)
        places[:, 0] += frame_idx
        if earlier is not None:
            places = torch.cat([earlier, places], dim=2)
        (changed,) = with_values({KEY: places}, cond)
        return changed

    @classmethod
    def append_keyframe(
        cls,
        positive: Conditioning,
        negative: Conditioning,
        frame_idx: int,
        latent_image: Tensor,
        noise_mask: Tensor,
        guiding_latent: Tensor,
        strength: float,
        scale_factors: Scales,
        guide_mask: Tensor | None = None,
        in_channels: int = CHANNELS,
    ) -> tuple[Conditioning, Conditioning, Tensor, Tensor]:
        """Both conditionings, latent and noise mask with a guide appended.

        Args:
            strength: 1 keeps the guide as it is; less lets it change.
            guide_mask: [B, 1, T, H, W], in place of ones: what of the guide may change.

        Raises:
            ValueError: One of the latents is none of pictures alone.
        """
        found = (latent_image.shape[1], guiding_latent.shape[1])
        if found != (in_channels, in_channels):
            raise ValueError(
                f"latent: expected a video latent of {in_channels} channels and a guide of as "
                f"many, found {found[0]} and {found[1]}; add guides before sound is joined"
            )
        pair = [
            cls.add_keyframe_index(one, frame_idx, guiding_latent, scale_factors)
            for one in (positive, negative)
        ]
        batch = max(latent_image.shape[0], noise_mask.shape[0])
        if guide_mask is None:
            shape = (batch, 1, guiding_latent.shape[2], *noise_mask.shape[3:])
            mask = noise_mask.new_full(shape, 1.0 - strength)
        else:
            size = [max(a, b) for a, b in zip(noise_mask.shape[3:], guide_mask.shape[3:])]
            noise_mask = noise_mask.expand(-1, -1, -1, *size)
            mask = (guide_mask.to(noise_mask) - strength).expand(batch, -1, -1, *size)
        guide = guiding_latent.to(latent_image).expand(latent_image.shape[0], -1, -1, -1, -1)
        return (
            pair[0],
            pair[1],
            torch.cat([latent_image, guide], dim=2),
            torch.cat([noise_mask.expand(batch, -1, -1, -1, -1), mask], dim=2),
        )

    @classmethod
    def execute(
        cls,
        positive: Any,
        negative: Any,
        vae: Any,
        latent: Latent,
        image: Tensor,
        frame_idx: int,
        strength: float,
    ) -> io.NodeOutput:
        samples = samples_of(latent, "latent", VIDEO)
        scales = vae.downscale_index_formula or SCALES
        length, rows, columns = samples.shape[2:]
        frames, guide = cls.encode(vae, columns, rows, image, scales)
        begin, cell = cls.get_latent_index(positive, length, frames.shape[0], frame_idx, scales)
        own = length - get_keyframe_idxs(positive)[1]
        if cell + guide.shape[2] > own:
            raise ValueError(
                f"frame_idx: expected a guide that ends within the video's {(own - 1) * scales[0]}"
                f" + 1 frames, found one of {frames.shape[0]} frames that begins at frame {begin}"
            )
        *pair, samples, mask = cls.append_keyframe(
            positive, negative, begin, samples, get_noise_mask(latent), guide, strength, scales
        )
        return io.NodeOutput(*pair, {**latent, "samples": samples, "noise_mask": mask})

    generate = execute


class LTXVCropGuides(io.ComfyNode):
    """Cuts the guides off a latent and out of the conditionings."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVCropGuides",
            category="conditioning/video_models",
            inputs=[*pair_inputs(), io.Latent.Input("latent")],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(cls, positive: Any, negative: Any, latent: Latent) -> io.NodeOutput:
        samples = samples_of(latent, "latent", VIDEO).clone()
        mask = get_noise_mask(latent)
        _, guides = get_keyframe_idxs(positive)
        if guides >= samples.shape[2]:
            raise ValueError(
                f"latent: expected more than the {guides} cells of the guides, found "
                f"{samples.shape[2]}; connect the latent that the guides were added to"
            )
        if guides:
            samples, mask = samples[:, :, :-guides], mask[:, :, :-guides]
            positive, negative = with_values({KEY: None}, positive, negative)
        return io.NodeOutput(positive, negative, {**latent, "samples": samples, "noise_mask": mask})

    crop = execute
