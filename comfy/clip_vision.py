"""Image encoders as nodes use them: from a file to states that describe a picture."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comfy.devices import placement, precision, residency
from comfy.ldm.clip.vision import CLIP_KIND, SIGLIP_KIND, CLIPVisionModelProjection
from comfy.ldm.dino.vision import DINO_KIND, Dinov2Model
from comfy.ops import manual_cast
from comfy.patching.patcher import ModelPatcher
from comfy.weights.contents import contents_in_words
from comfy.weights.errors import WeightFileError
from comfy.weights.fill import IncompleteWeightsError, fill
from comfy.weights.state_dict import load_torch_file

logger = logging.getLogger(__name__)

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
SIGLIP_MEAN = SIGLIP_STD = (0.5, 0.5, 0.5)
DINO_MEAN, DINO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DINO_MARK = "embeddings.patch_embeddings.projection.weight"
FULL_SIZE, FULL_HEADS, CHANNELS_PER_HEAD = 1024, 16, 64
OPENCLIP_PREFIX = "visual."
STATES_AXES = 3
ODD_SIZES = {(729, 14): 384}  # (places, patch) -> size, where patches do not cover the picture


class Output:
    """States of a picture: attributes that can also be read and set as items."""

    last_hidden_state: Tensor
    image_embeds: Tensor
    penultimate_hidden_states: Tensor | None

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __setitem__(self, key: str, item: Any) -> None:
        setattr(self, key, item)


def states_of(seen: Any, id: str) -> Tensor:
    """The last states [B, places, width] of what an image encoder saw.

    Args:
        id: Name of the input that it came through.

    Raises:
        ValueError: It holds none.
    """
    states = getattr(seen, "last_hidden_state", None)
    if not torch.is_tensor(states) or states.ndim != STATES_AXES:
        found = f"a tensor {tuple(states.shape)}" if torch.is_tensor(states) else f"{states!r:.50}"
        raise ValueError(
            f"{id}: expected what an image encoder saw, with last_hidden_state [batch, places, "
            f"width], found {found} in {type(seen).__name__}; connect CLIPVisionEncode"
        )
    return states


def clip_preprocess(
    image: Tensor,
    size: int = 224,
    mean: Sequence[float] = CLIP_MEAN,
    std: Sequence[float] = CLIP_STD,
    crop: bool = True,
) -> Tensor:
    """Pictures ``[B, H, W, C]`` in 0..1 as an encoder takes them: ``[B, 3, size, size]``,
    standardised.

    Args:
        crop: Cut the middle square; otherwise the picture is stretched to one.
    """
    pixels = image[..., :3].movedim(-1, 1)
    height, width = pixels.shape[2:]
    if (height, width) != (size, size):
        target = (size, size)
        if crop:
            scale = size / min(height, width)
            target = (round(scale * height), round(scale * width))
        pixels = F.interpolate(pixels, size=target, mode="bicubic", antialias=True)
        top, left = (pixels.shape[2] - size) // 2, (pixels.shape[3] - size) // 2
        pixels = pixels[:, :, top : top + size, left : left + size]
    pixels = (255.0 * pixels).clip(0, 255).round() / 255.0  # the 8 bits encoders were trained on
    centre = torch.tensor(mean, device=pixels.device, dtype=pixels.dtype).view(3, 1, 1)
    spread = torch.tensor(std, device=pixels.device, dtype=pixels.dtype).view(3, 1, 1)
    return (pixels - centre) / spread


class ClipVisionModel:
    """An image encoder.

    Attributes:
        model: The network.
        patcher: The patcher around it.
        image_size, image_mean, image_std: How pictures are prepared.
        load_device, dtype: Where it runs and in which type its weights are.
    """

    def __init__(self, json_config: dict[str, Any]) -> None:
        config = dict(json_config)
        siglip = config.get("model_type") == SIGLIP_KIND
        self.image_size: int = config.get("image_size", 224)
        self.image_mean = config.get("image_mean", SIGLIP_MEAN if siglip else CLIP_MEAN)
        self.image_std = config.get("image_std", SIGLIP_STD if siglip else CLIP_STD)
        self.return_all_hidden_states = siglip or config.get("projector_type") is not None
        self.load_device = placement.text_encoder_device()
        self.dtype = precision.text_encoder_dtype(self.load_device)
        kind = Dinov2Model if config.get("model_type") == DINO_KIND else CLIPVisionModelProjection
        self.model = kind(config, self.dtype, "meta", manual_cast).eval()
        self.patcher: Any = None

    def load_sd(self, sd: dict[str, Tensor]) -> None:
        """Fill the network; raises IncompleteWeightsError when weights are missing."""
        fill(self.model, sd, "image encoder")
        self.patcher = ModelPatcher(
            self.model,
            load_device=self.load_device,
            offload_device=placement.text_encoder_offload_device(),
        )

    def get_sd(self) -> dict[str, Tensor]:
        """Weights by key."""
        return self.model.state_dict()

    def encode_image(self, image: Tensor, crop: bool = True) -> Output:
        """States of pictures ``[B, H, W, C]`` in 0..1."""
        residency.load_model_gpu(self.patcher)
        wanted = "all" if self.return_all_hidden_states else -2

        def run() -> Any:
            pixels = clip_preprocess(
                image.to(self.load_device), self.image_size, self.image_mean, self.image_std, crop
            ).float()
            return self.model(pixel_values=pixels, intermediate_output=wanted)

        last, between, embeds, tokens = residency.run_or_make_room(self.patcher, run)
        resting = placement.intermediate_device()
        output = Output()
        output.last_hidden_state = last.to(resting)
        output.image_embeds = embeds.to(resting)
        if self.return_all_hidden_states:
            output["all_hidden_states"] = between.to(resting)
            between = between[:, -2]
        output.penultimate_hidden_states = between.to(resting)
        output["mm_projected"] = None if tokens is None else tokens.to(resting)
        return output


def vision_config(sd: dict[str, Tensor]) -> dict[str, Any]:
    """Configuration of an image encoder from its keys and shapes.

    Raises:
        IncompleteWeightsError: The tensors are not those of an image encoder.
    """
    if DINO_MARK in sd:
        return dino_config(sd)
    try:
        patch = sd["vision_model.embeddings.patch_embedding.weight"].shape
        places = sd["vision_model.embeddings.position_embedding.weight"].shape[0]
        inner = sd["vision_model.encoder.layers.0.mlp.fc1.weight"].shape[0]
    except KeyError as error:
        raise IncompleteWeightsError(
            f"no image encoder: {error} is missing; found {contents_in_words(sorted(sd))}"
        ) from error
    width, siglip = patch[0], "vision_model.embeddings.class_embedding" not in sd
    side = round((places if siglip else places - 1) ** 0.5)
    layers = {m[1] for key in sd if (m := re.match(r"vision_model\.encoder\.layers\.(\d+)\.", key))}
    projection = sd.get("visual_projection.weight")
    if siglip:
        activation = "gelu_pytorch_tanh"
    else:  # OpenAI's largest is ViT-L; the wider ones come from OpenCLIP
        activation = "quick_gelu" if width <= FULL_SIZE else "gelu"
    return {
        "model_type": SIGLIP_KIND if siglip else CLIP_KIND,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": len(layers),
        "num_attention_heads": FULL_HEADS
        if width >= FULL_SIZE
        else max(1, width // CHANNELS_PER_HEAD),
        "num_channels": patch[1],
        "patch_size": patch[2],
        "image_size": ODD_SIZES.get((places, patch[2]), side * patch[2]),
        "hidden_act": activation,
        "projection_dim": None if projection is None else projection.shape[0],
        "projector_type": "llava3" if "multi_modal_projector.linear_1.bias" in sd else None,
    }


def dino_config(sd: dict[str, Tensor]) -> dict[str, Any]:
    """As `vision_config`, of DINOv2."""
    try:
        places = sd["embeddings.position_embeddings"].shape[1]
        gated = "encoder.layer.0.mlp.weights_out.weight" in sd
        last = "weights_out" if gated else "fc2"
        inner = sd[f"encoder.layer.0.mlp.{last}.weight"].shape[1]
    except KeyError as error:
        raise IncompleteWeightsError(f"the image encoder (DINOv2) lacks {error}") from error
    width, channels, patch = sd[DINO_MARK].shape[:3]
    layers = {m[1] for key in sd if (m := re.match(r"encoder\.layer\.(\d+)\.", key))}
    return {
        "model_type": DINO_KIND,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": len(layers),
        "num_attention_heads": max(1, width // CHANNELS_PER_HEAD),
        "num_channels": channels,
        "patch_size": patch,
        "image_size": round((places - 1) ** 0.5) * patch,
        "use_swiglu_ffn": gated,
        "image_mean": DINO_MEAN,
        "image_std": DINO_STD,
    }


def convert_to_transformers(sd: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Weights with OpenCLIP's names below ``prefix`` as weights with CLIP's names."""
    whole = {
        "class_embedding": "embeddings.class_embedding",
        "conv1.weight": "embeddings.patch_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_pre.weight": "pre_layrnorm.weight",
        "ln_pre.bias": "pre_layrnorm.bias",
        "ln_post.weight": "post_layernorm.weight",
        "ln_post.bias": "post_layernorm.bias",
    }
    parts = {
        "ln_1": "layer_norm1",
        "ln_2": "layer_norm2",
        "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
        "attn.out_proj": "self_attn.out_proj",
    }
    converted: dict[str, Tensor] = {}
    for key, value in sd.items():
        name = key.removeprefix(prefix)
        layer = re.match(r"transformer\.resblocks\.(\d+)\.(.+)\.?(weight|bias)$", name)
        if name in whole:
            converted[f"vision_model.{whole[name]}"] = value
        elif name == "proj":
            converted["visual_projection.weight"] = value.transpose(0, 1).contiguous()
        elif layer is not None:
            number, part, kind = layer.groups()
            root = f"vision_model.encoder.layers.{number}."
            part = part.rstrip("._")
            if part == "attn.in_proj":
                for projection, third in zip("qkv", value.chunk(3)):
                    converted[f"{root}self_attn.{projection}_proj.{kind}"] = third
            else:
                converted[f"{root}{parts.get(part, part)}.{kind}"] = value
    return converted


def load_clipvision_from_sd(
    sd: dict[str, Tensor], prefix: str = "", convert_keys: bool = False
) -> ClipVisionModel:
    """An image encoder from tensors.

    Args:
        prefix: What its keys start with.
        convert_keys: Whether they are OpenCLIP's.
    """
    if convert_keys:
        weights = convert_to_transformers(sd, prefix)
    else:
        weights = {k.removeprefix(prefix): v for k, v in sd.items() if k.startswith(prefix)}
    encoder = ClipVisionModel(vision_config(weights))
    encoder.load_sd(weights)
    return encoder


def load(ckpt_path: str) -> ClipVisionModel:
    """An image encoder from a file, in CLIP's layout or OpenCLIP's.

    Raises:
        WeightFileError: The file cannot be read or holds no image encoder.
    """
    sd = load_torch_file(ckpt_path)
    is_openclip = f"{OPENCLIP_PREFIX}transformer.resblocks.0.attn.in_proj_weight" in sd
    try:
        if is_openclip:
            return load_clipvision_from_sd(sd, prefix=OPENCLIP_PREFIX, convert_keys=True)
        return load_clipvision_from_sd(sd)
    except IncompleteWeightsError as error:
        raise WeightFileError(
            ckpt_path, str(error), "choose the image encoder of a CLIP, SigLIP or DINOv2 model"
        ) from error
