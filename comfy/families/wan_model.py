"""Base models of Wan 2.1 and 2.2."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import conds, resize
from comfy.families.base import BaseModel
from comfy.families.family import ModelFamily
from comfy.families.model_type import ModelType
from comfy.families.references import shown_latents
from comfy.ldm.wan.model import VaceWanModel, WanModel
from comfy.ldm.wan.model_animate import AnimateWanModel
from comfy.ldm.wan.model_humo import HumoWanModel, with_silence
from comfy.ldm.wan.model_s2v import PARTS, S2VWanModel
from comfy.ops.encoded import weight_shape

MASK_CHANNELS = 4  # frames that share a latent frame
VACE_FRAME_CHANNELS, VACE_MASK_CHANNELS = 32, 64


class WAN21(BaseModel):
    """Text, a picture for the first frame, control videos beside the latent.

    Args:
        image_to_video: Whether a mask stands beside the picture even if nobody gives the picture.
    """

    network: ClassVar[type[nn.Module]] = WanModel
    usual_type = ModelType.FLOW
    text_width = "text_dim"

    def __init__(
        self,
        model_config: ModelFamily,
        model_type: ModelType | None = None,
        image_to_video: bool = False,
        device: torch.device | str | None = None,
        unet_model: type[nn.Module] | None = None,
    ) -> None:
        super().__init__(model_config, model_type, device, unet_model)
        self.image_to_video = image_to_video

    def concat_cond(self, **kwargs: Any) -> Tensor | None:
        """What stands beside the latent [B, C, T, H, W]: pictures, and a mask where there is room.

        The mask is given as 1 where frames are to be made; the network wants 1 where they are
        known.
        """
        noise: Tensor = kwargs["noise"]
        extra = weight_shape(self.diffusion_model.patch_embedding)[1] - noise.shape[1]
        if extra <= 0:
            return None
        image = self._concat_frames(kwargs.get("concat_latent_image"), noise, extra)
        has_room = extra == image.shape[1] + MASK_CHANNELS
        if not has_room and (not self.image_to_video or extra == image.shape[1]):
            return image
        image = image[:, : extra - MASK_CHANNELS]
        mask = self._known_frames(kwargs.get("concat_mask", kwargs.get("denoise_mask")), noise)
        index = int(kwargs.get("concat_mask_index", 0))
        return torch.cat([image[:, :index], mask, image[:, index:]], dim=1)

    def _concat_frames(self, image: Tensor | None, noise: Tensor, extra: int) -> Tensor:
        """Pictures at the size of the noise, each latent of them scaled; black without any."""
        if image is None:
            return noise.new_zeros((noise.shape[0], extra, *noise.shape[2:]))
        image = _resized(image.to(noise), noise)
        step = self.latent_format.latent_channels
        parts = [self.process_latent_in(part) for part in image.split(step, dim=1)]
        return resize.resize_to_batch_size(torch.cat(parts, dim=1), noise.shape[0])

    @staticmethod
    def _known_frames(mask: Tensor | None, noise: Tensor) -> Tensor:
        """1 where frames are known [B, 4, T, H, W]; nothing is known without a mask."""
        if mask is None:
            return torch.zeros_like(noise)[:, :MASK_CHANNELS]
        if mask.shape[1] != MASK_CHANNELS:
            mask = mask.mean(dim=1, keepdim=True)
        mask = _resized(1.0 - mask.to(noise), noise)
        missing = noise.shape[2] - mask.shape[2]
        if missing > 0:
            mask = functional.pad(mask, (0, 0, 0, 0, 0, missing))
        if mask.shape[1] == 1:
            mask = mask.repeat(1, MASK_CHANNELS, 1, 1, 1)
        return resize.resize_to_batch_size(mask, noise.shape[0])

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text, a picture's tokens, frames that follow, a reference latent."""
        made = super().extra_conds(**kwargs)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        seen = kwargs.get("clip_vision_output")
        if seen is not None:
            made["clip_fea"] = conds.CONDRegular(seen.penultimate_hidden_states)
        behind = kwargs.get("time_dim_concat")
        if behind is not None:
            made["time_dim_concat"] = conds.CONDRegular(self.process_latent_in(behind))
        references = kwargs.get("reference_latents")
        if references is not None:
            latent = shown_latents(self, references[-1:])[0][:, :, 0]
            made["reference_latent"] = conds.CONDRegular(latent)
        return made


class WAN21_Vace(WAN21):
    """Control videos with masks, each with a strength."""

    network = VaceWanModel

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """The control videos [B, N, C, T, H, W], too; one of nothing, all to be made, without
        any.
        """
        made = super().extra_conds(**kwargs)
        noise: Tensor = kwargs["noise"]
        size = (noise.shape[0], VACE_FRAME_CHANNELS, *noise.shape[2:])
        videos = kwargs.get("vace_frames") or [noise.new_zeros(size)]
        masks = kwargs.get("vace_mask")
        if masks is None:
            size = (noise.shape[0], VACE_MASK_CHANNELS, *noise.shape[2:])
            masks = [noise.new_ones(size)] * len(videos)
        step = self.latent_format.latent_channels
        joined = []
        for video, mask in zip(videos, masks):
            parts = [self.process_latent_in(part) for part in video.split(step, dim=1)]
            joined.append(torch.cat([*parts, mask.to(video)], dim=1))
        made["vace_context"] = conds.CONDCells(torch.stack(joined, dim=1))
        strengths = kwargs.get("vace_strength", [1.0] * len(joined))
        made["vace_strength"] = conds.CONDConstant(strengths)
        return made


class WAN22_Animate(WAN21):
    """Poses and pictures of a face."""

    network = AnimateWanModel

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Poses and pictures, too."""
        made = super().extra_conds(**kwargs)
        poses, face = kwargs.get("pose_video_latent"), kwargs.get("face_video_pixels")
        if poses is not None:
            made["pose_latents"] = conds.CONDRegular(self.process_latent_in(poses))
        if face is not None:
            made["face_pixel_values"] = conds.CONDRegular(face)
        return made


class WAN21_HuMo(WAN21):
    """A picture placed after the video, and sound."""

    network = HumoWanModel
    memory_usage_factor_conds = ("reference_latent",)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """The picture [B, C, R, H, W] with all channels of the input, and sound, too.

        Where the network knows frames by a mask and by channels beside the latent, the picture is
        known, and it stands in the latent as well.
        """
        made = super().extra_conds(**kwargs)
        heard, references = kwargs.get("audio_embed"), kwargs.get("reference_latents")
        if heard is not None:
            frames = kwargs["noise"].shape[2]
            made["audio_embed"] = conds.CONDFrames(with_silence(heard, frames))
        if references is not None:
            shown = shown_latents(self, references[-1:])[0]
            if "c_concat" in made:
                known = torch.ones_like(shown[:, :MASK_CHANNELS])
                shown = torch.cat([shown, known, shown], dim=1)
            made["reference_latent"] = conds.CONDRegular(shown)
        return made

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, list[int]]:
        """The picture weighs like a frame."""
        references = kwargs.get("reference_latents")
        return {} if references is None else {"reference_latent": list(references[-1].shape)}


class WAN22_S2V(WAN21):
    """A picture, sound, poses, and the frames before the video."""

    network = S2VWanModel
    memory_usage_factor_conds = ("reference_latent", "reference_motion")

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """All of them, too; sound is silent after its end."""
        made = super().extra_conds(**kwargs)
        heard, references = kwargs.get("audio_embed"), kwargs.get("reference_latents")
        if heard is not None:
            states = with_silence(heard.movedim(3, 1), kwargs["noise"].shape[2] * PARTS)
            made["audio_embed"] = conds.CONDFrames(states.movedim(1, 3), 3, PARTS)
        if references is not None:
            made["reference_latent"] = conds.CONDRegular(shown_latents(self, references[-1:])[0])
        for name, kind in (
            ("reference_motion", conds.CONDWhole),
            ("control_video", conds.CONDRegular),
        ):
            if kwargs.get(name) is not None:
                made[name] = kind(self.process_latent_in(kwargs[name]))
        return made

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, list[int]]:
        """The picture weighs like a frame, those before the video together like one and a half."""
        shapes = {}
        references, motion = kwargs.get("reference_latents"), kwargs.get("reference_motion")
        if references is not None:
            shapes["reference_latent"] = list(references[-1].shape)
        if motion is not None:
            batch, channels, _, height, width = motion.shape
            shapes["reference_motion"] = [batch, channels, height * width * 3 // 2]
        return shapes


class WAN21_Camera(WAN21):
    """The rays of a camera."""

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """The rays, too."""
        made = super().extra_conds(**kwargs)
        rays = kwargs.get("camera_conditions")
        if rays is not None:
            made["camera_conditions"] = conds.CONDRegular(rays)
        return made


class WAN22(WAN21):
    """Wan 2.2 5B: a given first frame is part of the latent, at time 0."""

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """The mask of what is to be made, too."""
        made = super().extra_conds(**kwargs)
        mask = kwargs.get("denoise_mask")
        if mask is not None:
            made["denoise_mask"] = conds.CONDCells(mask)
        return made

    def process_timestep(self, timestep: Tensor, **kwargs: Any) -> Tensor:
        """Time [B, T] of each frame: 0 where it is given."""
        mask = kwargs.get("denoise_mask")
        if mask is None:
            return timestep
        share = mask.mean(dim=(1, 3, 4))
        return share * timestep[:, None]

    def scale_latent_inpaint(
        self, sigma: Tensor, noise: Tensor, latent_image: Tensor, **kwargs: Any
    ) -> Tensor:
        """Given frames are never noised."""
        del sigma, noise, kwargs
        return latent_image


def _resized(video: Tensor, like: Tensor) -> Tensor:
    return resize.common_upscale(video, like.shape[-1], like.shape[-2], "bilinear", "center")
