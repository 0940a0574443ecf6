"""What a model family is: how its files are recognised and what is known about it beyond the
weights.

A family is a class whose attributes are facts (latent format, prediction type, key prefixes, usual
settings) and whose instances hold the configuration of one network. Recognition looks at keys and
shapes only and has three
answers: `matches` is False (not mine), an instance (mine), or `BrokenModelError` (mine, but this
file is damaged).
"""

# ruff: noqa: ARG002, RUF012 - hooks whose arguments rows use; class attributes are facts

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from comfy import latent_formats
from comfy.families.model_type import ModelType
from comfy.weights.fill import IncompleteWeightsError

if TYPE_CHECKING:
    from comfy.families.base import BaseModel

logger = logging.getLogger(__name__)

StateDict = dict[str, Tensor]
ReadConfig = Callable[[Mapping[str, Tensor], str], "dict[str, Any] | None"]


class BrokenModelError(IncompleteWeightsError):
    """A file has the layout of a known family, but parts of it are missing or contradict each
    other.
    """


class ClipTarget:
    """Which tokenizer and text encoder classes a checkpoint needs, and their constructor arguments.

    Args:
        tokenizer: Class of the tokenizer.
        clip: Class of the text encoder; its instance becomes `CLIP.cond_stage_model`.
    """

    def __init__(self, tokenizer: Callable[..., Any], clip: Callable[..., torch.nn.Module]) -> None:
        self.clip = clip
        self.tokenizer = tokenizer
        self.params: dict[str, Any] = {}


class ModelFamily:
    """Facts about one model family; an instance describes one network of that family.

    Attributes:
        unet_config: On the class: configuration values that identify the family. On an instance:
            the whole configuration of the network, sizes read from the weights plus what the family
            adds.
        unet_extra_config: Values that shapes cannot tell and the family fixes (head counts, norm
            groups).
        prediction: Prediction type of the family's networks, where all have the same.
        base_model: Class of the base model; None stands for `BaseModel`.
        required_keys: Keys outside the diffusion network that must exist, with the prefix they
            carry in the file.
        memory_usage_factor: Relative size of activations, 1.0 for Stable Diffusion 1.x.
    """

    unet_config: dict[str, Any] = {}
    unet_extra_config: dict[str, Any] = {}
    required_keys: ClassVar[tuple[str, ...]] = ()
    prediction: ClassVar[ModelType] = ModelType.EPS
    base_model: ClassVar[Any] = None
    read_config: staticmethod[[Mapping[str, Tensor], str], dict[str, Any] | None]

    clip_prefix: ClassVar[list[str]] = []
    clip_vision_prefix: str | None = None
    noise_aug_config: dict[str, Any] | None = None
    sampling_settings: dict[str, Any] = {}
    latent_format: Any = latent_formats.LatentFormat
    vae_key_prefix: ClassVar[list[str]] = ["first_stage_model."]
    text_encoder_key_prefix: ClassVar[list[str]] = ["cond_stage_model."]
    supported_inference_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    memory_usage_factor: float = 2.0

    manual_cast_dtype: torch.dtype | None = None
    custom_operations: Any = None
    scaled_fp8: torch.dtype | None = None
    quant_config: dict[str, Any] | None = None

    def __init__(self, unet_config: dict[str, Any]) -> None:
        self.unet_config = {**unet_config, **self.unet_extra_config}
        self.sampling_settings = dict(self.sampling_settings)
        self.latent_format = self.latent_format()
        self.optimizations = {"fp8": False}

    @classmethod
    def title(cls) -> str:
        """Name a person reads in messages: the first line of the class's docstring."""
        return (cls.__doc__ or cls.__name__).strip().splitlines()[0].rstrip(".")

    def read_header(self, metadata: Mapping[str, str] | None) -> None:
        """Takes what only a file's header tells about the network; most families need nothing."""

    def header(self) -> dict[str, str]:
        """What `read_header` needs of a saved file."""
        return {}

    @classmethod
    def matches(
        cls, unet_config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None
    ) -> bool:
        """Whether a detected configuration belongs to this family.

        Args:
            unet_config: What the family's layout reader found.
            state_dict: The whole file, for families that need a key outside the network; None skips
                that check.
        """
        agrees = all(unet_config.get(name) == value for name, value in cls.unet_config.items())
        if not agrees or state_dict is None:
            return agrees
        return all(key in state_dict for key in cls.required_keys)

    def model_type(self, state_dict: StateDict, prefix: str = "") -> ModelType:
        """Prediction type of the network; families with several read it from marker keys."""
        return self.prediction

    def inpaint_model(self) -> bool:
        """Whether the network takes a mask and a masked image beside the latent."""
        return False

    def set_inference_dtype(
        self, dtype: torch.dtype | None, manual_cast_dtype: torch.dtype | None
    ) -> None:
        """Fixes the dtype weights are kept in, and the one they are cast to at use (None: the
        same).
        """
        self.unet_config["dtype"] = dtype
        self.manual_cast_dtype = manual_cast_dtype

    def get_model(
        self, state_dict: StateDict, prefix: str = "", device: torch.device | str | None = None
    ) -> BaseModel:
        """Builds the base model without weights."""
        model_class = self.base_model
        if model_class is None:
            from comfy.families.base import BaseModel

            model_class = BaseModel
        model = model_class(self, model_type=self.model_type(state_dict, prefix), device=device)
        if self.inpaint_model():
            model.set_inpaint()
        return model

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget | None:
        """Text encoder of this family's checkpoints; None when they carry none."""
        return None

    def process_clip_state_dict(self, state_dict: StateDict) -> StateDict:
        """Text-encoder keys as in the file -> keys of the text encoder module."""
        return strip_prefixes(state_dict, self.text_encoder_key_prefix)

    def process_unet_state_dict(self, state_dict: StateDict) -> StateDict:
        """Network keys as in the file, without prefix -> keys of the network."""
        return state_dict

    def process_vae_state_dict(self, state_dict: StateDict) -> StateDict:
        """Autoencoder keys as in the file, without prefix -> keys of the autoencoder."""
        return state_dict

    def process_clip_state_dict_for_saving(self, state_dict: StateDict) -> StateDict:
        """Inverse of `process_clip_state_dict`."""
        return add_prefix(state_dict, self.text_encoder_key_prefix[0])

    def process_clip_vision_state_dict_for_saving(self, state_dict: StateDict) -> StateDict:
        """Image-encoder keys as in the file."""
        if self.clip_vision_prefix is None:
            return state_dict
        return add_prefix(state_dict, self.clip_vision_prefix)

    def process_unet_state_dict_for_saving(self, state_dict: StateDict) -> StateDict:
        """Network keys as in the file, with prefix."""
        return add_prefix(state_dict, "model.diffusion_model.")

    def process_vae_state_dict_for_saving(self, state_dict: StateDict) -> StateDict:
        """Autoencoder keys as in the file, with prefix."""
        return add_prefix(state_dict, self.vae_key_prefix[0])


def add_prefix(state_dict: Mapping[str, Tensor], prefix: str) -> StateDict:
    """The same tensors with `prefix` before every key."""
    return {prefix + key: value for key, value in state_dict.items()}


def strip_prefixes(state_dict: Mapping[str, Tensor], prefixes: list[str]) -> StateDict:
    """Entries whose key starts with one of the prefixes, without it."""
    return replace_prefixes(state_dict, dict.fromkeys(prefixes, ""))


def replace_prefixes(state_dict: Mapping[str, Tensor], renames: Mapping[str, str]) -> StateDict:
    """Entries whose key starts with one of the given prefixes, with that prefix replaced (first
    match wins).
    """
    renamed: StateDict = {}
    for key, value in state_dict.items():
        for old, new in renames.items():
            if key.startswith(old):
                renamed[new + key[len(old) :]] = value
                break
    return renamed


class TransformerFamily(ModelFamily):
    """A family of transformers, of whose files most name their parts alike."""

    vae_key_prefix = ["vae."]
    text_encoder_key_prefix = ["text_encoders."]


class UNetFamily(ModelFamily):
    """A family of Stable Diffusion's UNets: with more input channels they inpaint."""

    def inpaint_model(self) -> bool:
        """See the base."""
        return self.unet_config.get("in_channels", 4) > 4
