"""Small helpers for tensors, files and progress, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.families.openclip import clip_text_transformers_convert, transformers_convert
from comfy.nested_tensor import pack as pack_latents
from comfy.nested_tensor import unpack as unpack_latents
from comfy.patching.attributes import copy_to_param, get_attr, set_attr, set_attr_param
from comfy.progress import (
    PROGRESS_BAR_ENABLED,
    PROGRESS_BAR_HOOK,
    ProgressBar,
    set_progress_bar_enabled,
    set_progress_bar_global_hook,
)
from comfy.public import write_through
from comfy.resize import (
    bislerp,
    common_upscale,
    lanczos,
    repeat_to_batch_size,
    resize_to_batch_size,
)
from comfy.sampling.masks import reshape_mask
from comfy.tiling import get_tiled_scale_steps, tiled_scale, tiled_scale_multidim
from comfy.weights.diffusers_transformers import (
    auraflow_to_diffusers,
    flux_to_diffusers,
    mmdit_to_diffusers,
    pixart_to_diffusers,
    swap_scale_shift,
    z_image_to_diffusers,
)
from comfy.weights.diffusers_unet import (
    TRANSFORMER_BLOCKS,
    UNET_MAP_ATTENTIONS,
    UNET_MAP_BASIC,
    UNET_MAP_RESNET,
    unet_to_diffusers,
)
from comfy.weights.encodings import convert_old_quants
from comfy.weights.mapped_file import safetensors_header
from comfy.weights.rounding import string_to_seed
from comfy.weights.state_dict import (
    calculate_parameters,
    load_torch_file,
    save_torch_file,
    state_dict_key_replace,
    state_dict_prefix_replace,
    weight_dtype,
)

write_through(
    __name__,
    PROGRESS_BAR_ENABLED="comfy.progress",
    PROGRESS_BAR_HOOK="comfy.progress",
    TRANSFORMER_BLOCKS="comfy.weights.diffusers_unet",
    UNET_MAP_ATTENTIONS="comfy.weights.diffusers_unet",
    UNET_MAP_BASIC="comfy.weights.diffusers_unet",
    UNET_MAP_RESNET="comfy.weights.diffusers_unet",
)
