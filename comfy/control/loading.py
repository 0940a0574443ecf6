"""From a file to a control network: which kind it is, from keys and shapes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comfy import latent_formats
from comfy.control import diffusers_names
from comfy.control.base import ControlBase, no_preprocessing
from comfy.control.networks import ControlLora, ControlNet, ControlNetSD35, T2IAdapter
from comfy.devices import placement, precision
from comfy.families import detection
from comfy.families.dit_layout import read_flux_config, read_mmdit_config
from comfy.families.hunyuan_dit import read_hunyuan_dit_config
from comfy.ldm.flux.controlnet import ControlNetFlux
from comfy.ldm.hydit.controlnet import HunYuanControlNet
from comfy.ldm.mmdit.controlnet import ControlNet as SD3ControlNet
from comfy.ldm.mmdit.dit_embedder import POOLED_TEXT, ControlNetEmbedder
from comfy.ldm.t2i_adapter.model import Adapter, Adapter_light
from comfy.ldm.unet import controlnet
from comfy.ops import pick_operations
from comfy.ops.encoded import decoded_tensor
from comfy.weights.contents import contents_in_words
from comfy.weights.diffusers_mmdit import convert_diffusers_mmdit
from comfy.weights.errors import UnknownWeightFormatError, WeightFileError
from comfy.weights.fill import IncompleteWeightsError, fill
from comfy.weights.layout import arrange_convolutions
from comfy.weights.state_dict import (
    calculate_parameters,
    count_parts,
    load_torch_file,
    weight_dtype,
)

logger = logging.getLogger(__name__)

StateDict = dict[str, Tensor]
Options = Mapping[str, Any]
CLDM_PREFIXES = ("", "control_model.")
PIXELS_PER_CELL = 8
POOLING_ENDINGS = ("_shuffle", "_shuffle_fp16")  # networks that were trained without positions


def load_controlnet(
    ckpt_path: str, model: Any = None, model_options: Options | None = None
) -> ControlBase:
    """Load a control network file.

    Args:
        ckpt_path: The file.
        model: Diffusion model, for files that hold differences from it.
        model_options: ``dtype``, ``load_device``, ``custom_operations`` and the like.
    Raises:
        WeightFileError: The file cannot be read or is of no known kind.
    """
    weights, metadata = load_torch_file(ckpt_path, return_metadata=True)
    options = dict(model_options or {})
    stem = os.path.splitext(os.path.basename(ckpt_path))[0]
    options.setdefault("global_average_pooling", stem.endswith(POOLING_ENDINGS))
    try:
        control = load_controlnet_state_dict(weights, model, options, metadata)
    except IncompleteWeightsError as error:
        raise WeightFileError(ckpt_path, str(error), "choose a whole control network") from error
    if control is None:
        raise UnknownWeightFormatError(
            ckpt_path,
            f"no known control network: it holds {contents_in_words(sorted(weights))}",
            "choose a ControlNet, Control-LoRA or T2I adapter of Stable Diffusion 1.x, 2.x or "
            "SDXL, or a ControlNet of Stable Diffusion 3, 3.5 large, FLUX.1 or Hunyuan-DiT",
        )
    return control


def load_controlnet_state_dict(
    state_dict: StateDict,
    model: Any = None,
    model_options: Options | None = None,
    metadata: Mapping[str, str] | None = None,
) -> ControlBase | None:
    """As `load_controlnet`, from tensors; None for an unknown kind."""
    if "difference" in state_dict:
        state_dict = _add_base(state_dict, model)
    for load in KINDS.values():
        control = load(state_dict, model_options or {}, metadata)
        if control is not None:
            return control
    return None


def _add_base(weights: StateDict, model: Any) -> StateDict:
    """Whole weights of a ControlNet stored as differences from a diffusion model."""
    if model is None:
        raise ValueError(
            "this ControlNet holds differences from a diffusion model; load it with the node "
            "Load ControlNet Model (diff), which takes that model"
        )
    whole = {}
    for key, value in weights.items():
        own = decoded_tensor(model.model.diffusion_model, key.removeprefix("control_model."))
        whole[key] = value if own is None else value + own.to(value)
    return whole


def _load_lora(
    weights: StateDict, options: Options, metadata: Mapping[str, str] | None
) -> ControlBase | None:
    """Low-rank differences; a marker says so."""
    del metadata
    if "lora_controlnet" not in weights:
        return None
    pooling = bool(options.get("global_average_pooling"))
    return ControlLora(weights, pooling, options)


def _load_cldm(
    weights: StateDict, options: Options, metadata: Mapping[str, str] | None
) -> ControlBase | None:
    """A ControlNet with the names of the original code, bare or as part of a checkpoint, or with
    those of diffusers.
    """
    own = diffusers_names.to_native(weights)
    prefix = next((p for p in CLDM_PREFIXES if f"{p}zero_convs.0.0.weight" in weights), None)
    if own is None and prefix is not None:
        own = {k[len(prefix) :]: value for k, value in weights.items() if k.startswith(prefix)}
    if own is None:
        return None
    family = detection.model_config_from_unet(own, "", True, metadata)
    if family is None:
        return None
    config = dict(family.unet_config)
    for name in ("out_channels", "transformer_depth_output", "dtype"):
        config.pop(name, None)
    if "task_embedding" in own:
        config["union_controlnet_num_control_type"] = own["task_embedding"].shape[0]
    config["hint_channels"] = own["input_hint_block.0.weight"].shape[1]
    load_device = options.get("load_device") or placement.get_torch_device()
    dtype = options.get("dtype") or precision.unet_dtype(
        device=load_device,
        model_params=calculate_parameters(own),
        weight_dtype=weight_dtype(own),
    )
    cast = precision.unet_manual_cast(dtype, load_device)
    operations = options.get("custom_operations") or pick_operations(dtype, cast)
    network = controlnet.ControlNet(**config, dtype=dtype, device="meta", operations=operations)
    arrange_convolutions(network, load_device)
    fill(network, own, "ControlNet")
    return ControlNet(
        network.eval(),
        global_average_pooling=bool(options.get("global_average_pooling")),
        load_device=load_device,
        manual_cast_dtype=cast,
    )


def _load_flux(
    weights: StateDict, options: Options, metadata: Mapping[str, str] | None
) -> ControlBase | None:
    """A ControlNet of FLUX, under the names of FLUX (XLabs, MistoLine) or of diffusers
    (InstantX).
    """
    del metadata
    is_diffusers = "controlnet_x_embedder.weight" in weights
    own = _native(weights) if is_diffusers else weights
    is_mistoline = "controlnet_blocks.0.linear.weight" in weights
    if own is None or ("controlnet_blocks.0.weight" not in own and not is_mistoline):
        return None
    config = read_flux_config(own)
    if config is None:
        return None
    hint_channels = None
    if is_diffusers:
        hint_channels = own["pos_embed_input.weight"].shape[1] // config["patch_size"] ** 2
        modes = own.get("controlnet_mode_embedder.weight")
        config["num_union_modes"] = 0 if modes is None else modes.shape[0]
    sizes = {**config, "latent_input": is_diffusers, "control_latent_channels": hint_channels}
    sizes["mistoline"] = is_mistoline
    return _transformer_control(
        ControlNetFlux,
        sizes,
        own,
        options,
        compression_ratio=1 if is_diffusers else PIXELS_PER_CELL,
        latent_format=latent_formats.Flux() if is_diffusers else None,
        concat_mask=hint_channels is not None and hint_channels != config["in_channels"],
        extra_conds=("y", "guidance"),
    )


def _load_sd3(
    weights: StateDict, options: Options, metadata: Mapping[str, str] | None
) -> ControlBase | None:
    """A ControlNet of Stable Diffusion 3, under the names of diffusers or our own."""
    del metadata
    own = _native(weights) or weights
    config = read_mmdit_config(own) if "pos_embed_input.proj.weight" in own else None
    if config is None:
        return None
    hint_channels = own["pos_embed_input.proj.weight"].shape[1]
    space = latent_formats.SD3()
    space.shift_factor = 0  # these networks were trained without it
    return _transformer_control(
        SD3ControlNet,
        {**config, "control_latent_channels": hint_channels},
        own,
        options,
        compression_ratio=1,
        latent_format=space,
        concat_mask=hint_channels != config["in_channels"],
    )


def _load_sd35(
    weights: StateDict, options: Options, metadata: Mapping[str, str] | None
) -> ControlBase | None:
    """A ControlNet of Stable Diffusion 3.5 large; a tensor tells which kind of hint it knows."""
    del metadata
    own = {_sd35_name(key): value for key, value in weights.items() if key != "control_type"}
    if "transformer_blocks.0.adaLN_modulation.1.weight" not in own or SD35_TEXT not in own:
        return None
    width, text_width = own[SD35_TEXT].shape
    double = width == text_width
    if double:  # filled before each run; the file has no need of it
        own.update(_empty_embedder(width, own[SD35_TEXT]))
    kind = round(float(weights["control_type"])) if "control_type" in weights else None
    return _transformer_control(
        ControlNetEmbedder,
        {
            "hidden_size": width,
            "num_layers": count_parts(own, "transformer_blocks."),
            "main_model_double": width // SD35_HEAD,
            "double_y_emb": double,
            "in_channels": own["pos_embed_input.proj.weight"].shape[1],
            "pooled_size": POOLED_TEXT if double else text_width,
        },
        own,
        options,
        wrapper=ControlNetSD35,
        compression_ratio=1,
        latent_format=latent_formats.SD3(),
        preprocess_image=SD35_HINTS.get(kind, no_preprocessing),
    )


def _load_hunyuan_dit(
    weights: StateDict, options: Options, metadata: Mapping[str, str] | None
) -> ControlBase | None:
    """A ControlNet of Hunyuan-DiT."""
    del metadata
    config = read_hunyuan_dit_config(weights) if "after_proj_list.0.weight" in weights else None
    if config is None:
        return None
    return _transformer_control(
        HunYuanControlNet,
        config,
        weights,
        options,
        compression_ratio=1,
        latent_format=latent_formats.SDXL(),
        extra_conds=(
            "text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5",
            "image_meta_size", "style",
        ),
    )  # fmt: skip


SD35_TEXT = "y_embedder.mlp.0.weight"
SD35_HEAD = 64  # channels; there are as many blocks as heads
SD35_NAMES = {
    "pos_embed.": "x_embedder.",
    "time_text_embed.timestep_embedder.linear_1.": "t_embedder.mlp.0.",
    "time_text_embed.timestep_embedder.linear_2.": "t_embedder.mlp.2.",
    "time_text_embed.text_embedder.linear_1.": "y_embedder.mlp.0.",
    "time_text_embed.text_embedder.linear_2.": "y_embedder.mlp.2.",
}
CANNY, DEPTH = 1, 2  # numbers in the files; blur (0) takes pictures as they are
SD35_HINTS: dict[int | None, Callable[[Tensor], Tensor]] = {
    CANNY: lambda picture: picture * 255 * 0.5 + 0.5,
    DEPTH: lambda picture: 1.0 - picture,
}


def _sd35_name(key: str) -> str:
    """A name of the library as ours."""
    for theirs, ours in SD35_NAMES.items():
        if key.startswith(theirs):
            return ours + key[len(theirs) :]
    return key


def _empty_embedder(width: int, like: Tensor) -> StateDict:
    """Weights of the embedder that is borrowed from the controlled model."""
    shapes = {"mlp.0": (width, POOLED_TEXT), "mlp.2": (width, width)}
    made = {}
    for layer, shape in shapes.items():
        made[f"orig_y_embedder.{layer}.weight"] = torch.zeros(shape, dtype=like.dtype)
        made[f"orig_y_embedder.{layer}.bias"] = torch.zeros(shape[0], dtype=like.dtype)
    return made


def _native(weights: StateDict) -> StateDict | None:
    """Weights of the diffusers library under our names, with those that have the same in both."""
    converted = convert_diffusers_mmdit(weights)
    return None if converted is None else {**weights, **converted}


def _transformer_control(
    kind: Callable[..., nn.Module],
    sizes: Mapping[str, Any],
    weights: StateDict,
    options: Options,
    wrapper: type[ControlNet] = ControlNet,
    **facts: Any,
) -> ControlNet:
    """A transformer ControlNet, built and filled."""
    load_device = options.get("load_device") or placement.get_torch_device()
    dtype = options.get("dtype") or precision.unet_dtype(
        device=load_device,
        model_params=calculate_parameters(weights),
        weight_dtype=weight_dtype(weights),
    )
    cast = precision.unet_manual_cast(dtype, load_device)
    operations = options.get("custom_operations") or pick_operations(dtype, cast)
    network = kind(**sizes, dtype=dtype, device="meta", operations=operations)
    fill(network, weights, "ControlNet")
    return wrapper(network.eval(), load_device=load_device, manual_cast_dtype=cast, **facts)


def _load_t2i(
    weights: StateDict, options: Options, metadata: Mapping[str, str] | None
) -> ControlBase | None:
    """A T2I adapter, possibly under the key ``adapter.``; channels and blocks from shapes."""
    del options, metadata
    weights = {key.removeprefix("adapter."): value for key, value in weights.items()}
    if "body.0.in_conv.weight" in weights and "conv_in.weight" not in weights:
        cin = weights["body.0.in_conv.weight"].shape[1]
        channels = [weights[f"body.{n}.out_conv.weight"].shape[0] for n in range(4)]
        network: Adapter | Adapter_light = Adapter_light(
            channels=channels, nums_rb=count_parts(weights, "body.0.body."), cin=cin
        )
    elif "conv_in.weight" in weights and "body.0.block1.weight" in weights:
        network = _full_adapter(weights)
    else:
        return None
    fill(network, weights, "T2I adapter")
    return T2IAdapter(network.eval(), network.input_channels, 8, "nearest-exact")


def _full_adapter(weights: StateDict) -> Adapter:
    """The full form; SDXL's is known by its input of 16x16 pixels a cell."""
    first = weights["conv_in.weight"]
    cin, width = first.shape[1], first.shape[0]
    blocks = count_parts(weights, "body.")
    widths = [weights[f"body.{n}.block1.weight"].shape[0] for n in range(blocks)]
    per_level = blocks // 4
    channels = [widths[level * per_level] for level in range(4)]
    channels[0] = width
    return Adapter(
        channels=channels,
        nums_rb=per_level,
        cin=cin,
        ksize=weights["body.0.block2.weight"].shape[-1],
        sk="body.0.skep.weight" not in weights,
        use_conv=any("down_opt.op.weight" in key for key in weights),
        xl=cin in (256, 768),
    )


Loader = Callable[[StateDict, Options, Mapping[str, str] | None], ControlBase | None]

# Kind -> how to load it; the first that recognises the weights wins.
KINDS: dict[str, Loader] = {
    "control-lora": _load_lora,
    "controlnet": _load_cldm,
    "t2i-adapter": _load_t2i,
    "flux": _load_flux,
    "sd3": _load_sd3,
    "sd3.5 large": _load_sd35,
    "hunyuan dit": _load_hunyuan_dit,
}
