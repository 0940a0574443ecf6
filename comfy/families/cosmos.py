"""Cosmos Predict 2: text to picture, picture to video, conditioned on the first T5 XXL."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comfy import conds, latent_formats, resize
from comfy.families.base import BaseModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import BrokenModelError, ClipTarget, ModelFamily, StateDict
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import t5_dtype
from comfy.ldm.cosmos.predict2 import MiniTrainDIT
from comfy.text_encoders import t5_alone

MARK = "blocks.0.mlp.layer1.weight"
PATCH = 2
USUAL_WIDTH, LARGE_WIDTH = 2048, 5120
MASKED_CHANNELS = 17  # of a latent with a mask of the frames that are given
# Of every published network, whatever its size.
CONSTANTS: dict[str, Any] = {
    "image_model": "cosmos_predict2", "max_img_h": 240, "max_img_w": 240, "max_frames": 128,
    "patch_spatial": PATCH, "patch_temporal": 1, "concat_padding_mask": True,
    "pos_emb_cls": "rope3d", "pos_emb_learnable": True, "pos_emb_interpolation": "crop",
    "min_fps": 1, "max_fps": 30, "use_adaln_lora": True, "rope_enable_fps_modulation": False,
    "extra_per_block_abs_pos_emb": False, "extra_h_extrapolation_ratio": 1.0,
    "extra_w_extrapolation_ratio": 1.0, "extra_t_extrapolation_ratio": 1.0,
}  # fmt: skip
# How far positions are spread: along rows and columns, along frames.
PICTURE_SPREAD, VIDEO_SPREAD, LARGE_VIDEO_SPREAD = (4.0, 1.0), (3.0, 1.0), (2.0, 20.0 / 24.0)


def read_cosmos_predict2_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the Cosmos Predict 2 network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "Cosmos Predict 2")
    width, cell = shapes["x_embedder.proj.1.weight"]
    head = shapes["blocks.0.self_attn.q_norm.weight"][0]
    if width % head:
        raise BrokenModelError(
            f"{prefix}x_embedder.proj.1.weight makes {width} channels, which heads of {head} "
            "channels do not divide"
        )
    channels = cell // PATCH**2 - 1
    side, time = PICTURE_SPREAD
    if channels == MASKED_CHANNELS:
        side, time = LARGE_VIDEO_SPREAD if width == LARGE_WIDTH else VIDEO_SPREAD
    return {
        **CONSTANTS,
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // PATCH**2,
        "model_channels": width,
        "num_blocks": shapes.count("blocks."),
        "num_heads": width // head,
        "mlp_ratio": shapes[MARK][0] / width,
        "crossattn_emb_channels": shapes["blocks.0.cross_attn.k_proj.weight"][1],
        "adaln_lora_dim": shapes["blocks.0.adaln_modulation_self_attn.1.weight"][0],
        "rope_h_extrapolation_ratio": side,
        "rope_w_extrapolation_ratio": side,
        "rope_t_extrapolation_ratio": time,
    }


class CosmosModel(BaseModel):
    """What Cosmos 1 and Cosmos Predict 2 have in common: text, the rate, and for some networks a
    mask of given frames.
    """

    text_width = "crossattn_emb_channels"

    def __init__(
        self,
        model_config: ModelFamily,
        model_type: ModelType | None = None,
        device: torch.device | str | None = None,
        unet_model: type[nn.Module] | None = None,
    ) -> None:
        super().__init__(model_config, model_type, device, unet_model)
        self.image_to_video = model_config.unet_config.get("in_channels") == MASKED_CHANNELS

    def concat_cond(self, **kwargs: Any) -> Tensor | None:
        """1 where frames are given, as a channel."""
        if not self.image_to_video:
            return None
        noise: Tensor = kwargs["noise"]
        mask = kwargs.get("concat_mask", kwargs.get("denoise_mask"))
        if mask is None:
            return torch.zeros_like(noise[:, :1])
        mask = mask.mean(dim=1, keepdim=True)
        if mask.shape[-2:] != noise.shape[-2:]:
            size = (noise.shape[-1], noise.shape[-2])
            mask = resize.common_upscale(mask, *size, "bilinear", "center")
        return 1.0 - resize.repeat_to_batch_size(mask.round(), noise.shape[0]).to(noise)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text tokens, not repeated to match others, and the rate."""
        made = super().extra_conds(**kwargs)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        made["fps"] = conds.CONDConstant(kwargs.get("frame_rate"))
        return made


class CosmosPredict2Model(CosmosModel):
    """Given frames are at time 0."""

    network = MiniTrainDIT
    usual_type = ModelType.FLOW_COSMOS

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """As the base, and what is to be made."""
        made = super().extra_conds(**kwargs)
        mask = kwargs.get("concat_mask", kwargs.get("denoise_mask"))
        if mask is not None:
            made["denoise_mask"] = conds.CONDCells(mask)
        return made

    def process_timestep(self, timestep: Tensor, **kwargs: Any) -> Tensor:
        """Time [B, T] of each frame of a video: 0 where it is given."""
        mask = kwargs.get("denoise_mask")
        if mask is None or mask.ndim < 5:
            return timestep
        return mask.mean(dim=(1, 3, 4)) * timestep[:, None]

    def scale_latent_inpaint(
        self, sigma: Tensor, noise: Tensor, latent_image: Tensor, **kwargs: Any
    ) -> Tensor:
        """Given frames are never noised; scaled so that the network finds them as they are."""
        del kwargs
        per_item = sigma.reshape([sigma.shape[0]] + [1] * (noise.ndim - 1))
        return latent_image * (per_item + 1.0)


class CosmosT2IPredict2(ModelFamily):
    """Cosmos Predict 2, text to picture."""

    unet_config: dict[str, Any] = {"image_model": "cosmos_predict2"}
    read_config = staticmethod(read_cosmos_predict2_config)
    sampling_settings = {"sigma_data": 1.0, "sigma_max": 80.0, "sigma_min": 0.002}
    latent_format: Any = latent_formats.Wan21
    memory_usage_factor = 1.0
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    prediction = ModelType.FLOW_COSMOS
    base_model = CosmosPredict2Model

    def __init__(self, unet_config: dict[str, Any]) -> None:
        super().__init__(unet_config)
        width = self.unet_config.get("model_channels", USUAL_WIDTH)
        self.memory_usage_factor = width / USUAL_WIDTH * 0.95

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """The first T5 XXL."""
        return ClipTarget(
            t5_alone.t5_alone_tokenizer(t5_alone.COSMOS),
            t5_alone.t5_alone_clip(t5_alone.COSMOS, t5_dtype(state_dict)),
        )


class CosmosI2VPredict2(CosmosT2IPredict2):
    """Cosmos Predict 2, picture to video."""

    unet_config = {"image_model": "cosmos_predict2", "in_channels": MASKED_CHANNELS}
