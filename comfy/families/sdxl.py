"""SDXL: a UNet whose first level has no transformers, conditioned on two CLIP encoders and picture
sizes.

The distilled variants (SSD-1B, Vega, KOALA) differ in depth only; they have rows of their own
because custom nodes ask for them by name.
"""
# ruff: noqa: ARG002, RUF012 - hooks of the base; class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy import latent_formats
from comfy.families import openclip, sdxl_model
from comfy.families.family import (
    ClipTarget,
    StateDict,
    UNetFamily,
    replace_prefixes,
)
from comfy.families.model_type import ModelType
from comfy.families.unet_layout import read_unet_config
from comfy.text_encoders.sdxl import SDXLClipModel, SDXLRefinerClipModel, SDXLTokenizer

STRUCTURE = {"use_linear_in_transformer": True, "use_temporal_attention": False}


class SDXL(UNetFamily):
    """SDXL."""

    unet_config: dict[str, Any] = dict(STRUCTURE)
    unet_extra_config = {"num_heads": -1, "num_head_channels": 64}
    read_config = staticmethod(read_unet_config)
    latent_format: Any = latent_formats.SDXL
    memory_usage_factor = 0.8
    base_model = sdxl_model.SDXL

    @classmethod
    def matches(
        cls, unet_config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None
    ) -> bool:
        """A class embedding, no transformer in the first level, some in the last."""
        depths = unet_config.get("transformer_depth") or [1]
        has_vector = unet_config.get("adm_in_channels") is not None
        shape = has_vector and depths[0] == 0 and depths[-1] > 0
        return super().matches(unet_config, state_dict) and shape

    def model_type(self, state_dict: StateDict, prefix: str = "") -> ModelType:
        """Epsilon unless marker keys in the file say otherwise; sets the settings that go with
        it.
        """
        if "edm_mean" in state_dict and "edm_std" in state_dict:  # Playground 2.5
            self.latent_format = latent_formats.SDXL_Playground_2_5()
            self.sampling_settings = {"sigma_data": 0.5, "sigma_max": 80.0, "sigma_min": 0.002}
            return ModelType.EDM
        if "edm_vpred.sigma_max" in state_dict:
            self.sampling_settings["sigma_max"] = float(state_dict["edm_vpred.sigma_max"].item())
            if "edm_vpred.sigma_min" in state_dict:
                sigma_min = float(state_dict["edm_vpred.sigma_min"].item())
                self.sampling_settings["sigma_min"] = sigma_min
            return ModelType.V_PREDICTION_EDM
        if "v_pred" in state_dict:
            if "ztsnr" in state_dict:
                self.sampling_settings["zsnr"] = True
            return ModelType.V_PREDICTION
        return ModelType.EPS

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """CLIP ViT-L and OpenCLIP ViT-bigG."""
        return ClipTarget(SDXLTokenizer, SDXLClipModel)

    def process_clip_state_dict(self, state_dict: StateDict) -> StateDict:
        """Embedder 0 is CLIP's own layout, embedder 1 OpenCLIP's."""
        renames = {
            "conditioner.embedders.0.transformer.text_model.": "clip_l.transformer.text_model.",
            "conditioner.embedders.1.model.": "clip_g.model.",
        }
        return _convert_clip_g(replace_prefixes(state_dict, renames))

    def process_clip_state_dict_for_saving(self, state_dict: StateDict) -> StateDict:
        """Back to the two embedders."""
        l_and_g = dict(state_dict)
        scale = l_and_g.pop("clip_g.logit_scale", None)
        l_and_g.pop("clip_l.logit_scale", None)
        l_and_g.pop("clip_l.transformer.text_projection.weight", None)
        converted = openclip.from_clip(l_and_g, "clip_g.transformer.", "clip_g.model.")
        renames = {
            "clip_l.": "conditioner.embedders.0.",
            "clip_g.": "conditioner.embedders.1.",
        }
        saved = replace_prefixes(converted, renames)
        if scale is not None:
            saved["conditioner.embedders.1.model.logit_scale"] = scale
        return saved


class SSD1B(SDXL):
    """SSD-1B."""

    unet_config = {**STRUCTURE, "transformer_depth": [0, 0, 2, 2, 4, 4]}


class KOALA_700M(SDXL):
    """KOALA 700M."""

    unet_config = {**STRUCTURE, "transformer_depth": [0, 2, 5]}


class KOALA_1B(SDXL):
    """KOALA 1B."""

    unet_config = {**STRUCTURE, "transformer_depth": [0, 2, 6]}


class Segmind_Vega(SDXL):
    """Segmind Vega."""

    unet_config = {**STRUCTURE, "transformer_depth": [0, 0, 1, 1, 2, 2]}


class SDXL_instructpix2pix(SDXL):
    """SDXL, instruct-pix2pix."""

    unet_config = {**STRUCTURE, "in_channels": 8}
    base_model = sdxl_model.SDXL_instructpix2pix


class SDXLRefiner(UNetFamily):
    """SDXL refiner."""

    unet_config = dict(STRUCTURE)
    unet_extra_config = {"num_heads": -1, "num_head_channels": 64}
    read_config = staticmethod(read_unet_config)
    latent_format = latent_formats.SDXL
    memory_usage_factor = 1.0
    base_model = sdxl_model.SDXLRefiner

    @classmethod
    def matches(
        cls, unet_config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None
    ) -> bool:
        """A class embedding, no transformer in the first level nor in the last."""
        depths = unet_config.get("transformer_depth") or [1]
        has_vector = unet_config.get("adm_in_channels") is not None
        shape = has_vector and depths[0] == 0 and depths[-1] == 0 and any(depths)
        return super().matches(unet_config, state_dict) and shape

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """OpenCLIP ViT-bigG alone."""
        return ClipTarget(SDXLTokenizer, SDXLRefinerClipModel)

    def process_clip_state_dict(self, state_dict: StateDict) -> StateDict:
        """Embedder 0 is OpenCLIP's layout here."""
        renames = {"conditioner.embedders.0.model.": "clip_g.model."}
        return _convert_clip_g(replace_prefixes(state_dict, renames))

    def process_clip_state_dict_for_saving(self, state_dict: StateDict) -> StateDict:
        """Back to the one embedder."""
        named = dict(state_dict)
        scale = named.pop("clip_g.logit_scale", None)
        converted = openclip.from_clip(named, "clip_g.transformer.", "clip_g.model.")
        saved = replace_prefixes(converted, {"clip_g.": "conditioner.embedders.0."})
        if scale is not None:
            saved["conditioner.embedders.0.model.logit_scale"] = scale
        return saved


def _convert_clip_g(state_dict: StateDict) -> StateDict:
    """bigG from OpenCLIP's layout below `clip_g.model.`, the temperature beside the network."""
    scale = state_dict.pop("clip_g.model.logit_scale", None)
    converted = openclip.to_clip(state_dict, "clip_g.model.", "clip_g.transformer.")
    return converted if scale is None else {**converted, "clip_g.logit_scale": scale}
