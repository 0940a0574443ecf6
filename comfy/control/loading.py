"""From a file to a control network: which kind it is, from keys and shapes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from comfy.control.base import ControlBase
from comfy.control.networks import ControlLora, ControlNet, T2IAdapter
from comfy.devices import placement, precision
from comfy.families import detection
from comfy.ldm.t2i_adapter.model import Adapter, Adapter_light
from comfy.ldm.unet import controlnet
from comfy.ops import pick_operations
from comfy.weights.errors import UnknownWeightFormatError
from comfy.weights.fill import fill, in_words
from comfy.weights.layout import arrange_convolutions
from comfy.weights.state_dict import calculate_parameters, load_torch_file, weight_dtype

logger = logging.getLogger(__name__)

StateDict = dict[str, Tensor]
Options = Mapping[str, Any]
CLDM_PREFIXES = ("", "control_model.")
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
    control = load_controlnet_state_dict(weights, model, options, metadata)
    if control is None:
        raise UnknownWeightFormatError(
            ckpt_path,
            f"no known control network: it holds {in_words(sorted(weights))}",
            "choose a ControlNet, Control-LoRA or T2I adapter of Stable Diffusion 1.x, 2.x or SDXL",
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
    base = model.model.diffusion_model.state_dict()
    whole = {}
    for key, value in weights.items():
        own = base.get(key.removeprefix("control_model."))
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
    """A ControlNet with the names of the original code, bare or as part of a checkpoint."""
    prefix = next((p for p in CLDM_PREFIXES if f"{p}zero_convs.0.0.weight" in weights), None)
    if prefix is None:
        return None
    own = {key[len(prefix) :]: value for key, value in weights.items() if key.startswith(prefix)}
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
    fill(network, own, "ControlNet")
    arrange_convolutions(network, load_device)
    return ControlNet(
        network.eval(),
        global_average_pooling=bool(options.get("global_average_pooling")),
        load_device=load_device,
        manual_cast_dtype=cast,
    )


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
            channels=channels, nums_rb=_count(weights, "body.0.body."), cin=cin
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
    blocks = _count(weights, "body.")
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


def _count(weights: StateDict, prefix: str) -> int:
    """How many numbers follow a prefix."""
    return len({key[len(prefix) :].split(".")[0] for key in weights if key.startswith(prefix)})


Loader = Callable[[StateDict, Options, Mapping[str, str] | None], ControlBase | None]

# Kind -> how to load it; the first that recognises the weights wins.
KINDS: dict[str, Loader] = {
    "control-lora": _load_lora,
    "controlnet": _load_cldm,
    "t2i-adapter": _load_t2i,
}
