"""Built-in nodes, the node table and pack loading, under the names custom nodes import."""
# ruff: noqa: F401

from __future__ import annotations

from comfy.public import write_through
from comfy_nodes.conditioning import (
    CLIPSetLastLayer,
    CLIPTextEncode,
    ConditioningAverage,
    ConditioningCombine,
    ConditioningConcat,
    ConditioningZeroOut,
)
from comfy_nodes.conditioning_areas import (
    ConditioningSetArea,
    ConditioningSetAreaPercentage,
    ConditioningSetAreaStrength,
    ConditioningSetMask,
    ConditioningSetTimestepRange,
)
from comfy_nodes.control import (
    ControlNetApply,
    ControlNetApplyAdvanced,
    ControlNetLoader,
    DiffControlNetLoader,
)
from comfy_nodes.custom_packs import EXTENSION_WEB_DIRS, LOADED_MODULE_DIRS, get_module_name
from comfy_nodes.image import (
    EmptyImage,
    ImageBatch,
    ImageInvert,
    ImagePadForOutpaint,
    ImageScale,
    ImageScaleBy,
)
from comfy_nodes.image_files import (
    LoadImage,
    LoadImageMask,
    LoadImageOutput,
    PreviewImage,
    SaveImage,
)
from comfy_nodes.latent import (
    EmptyLatentImage,
    LatentCrop,
    LatentFlip,
    LatentFromBatch,
    LatentRotate,
    LatentUpscale,
    LatentUpscaleBy,
    RepeatLatentBatch,
    SetLatentNoiseMask,
)
from comfy_nodes.latent_files import LoadLatent, SaveLatent
from comfy_nodes.latent_joining import LatentBlend, LatentComposite
from comfy_nodes.lifecycle import (
    before_node_execution,
    init_builtin_extra_nodes,
    init_external_custom_nodes,
    init_extra_nodes,
    interrupt_processing,
    load_custom_node,
)
from comfy_nodes.limits import MAX_RESOLUTION
from comfy_nodes.loaders import (
    CheckpointLoader,
    CheckpointLoaderSimple,
    CLIPLoader,
    DualCLIPLoader,
    LoraLoader,
    LoraLoaderModelOnly,
    UNETLoader,
    VAELoader,
)
from comfy_nodes.sampling import KSampler, KSamplerAdvanced, common_ksampler
from comfy_nodes.special_loaders import DiffusersLoader, unCLIPCheckpointLoader
from comfy_nodes.style import StyleModelApply, StyleModelLoader
from comfy_nodes.table import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from comfy_nodes.vae import (
    InpaintModelConditioning,
    VAEDecode,
    VAEDecodeTiled,
    VAEEncode,
    VAEEncodeForInpaint,
    VAEEncodeTiled,
)
from comfy_nodes.vision import (
    CLIPVisionEncode,
    CLIPVisionLoader,
    GLIGENLoader,
    GLIGENTextBoxApply,
    unCLIPConditioning,
)

write_through(
    __name__,
    EXTENSION_WEB_DIRS="comfy_nodes.custom_packs",
    LOADED_MODULE_DIRS="comfy_nodes.custom_packs",
    MAX_RESOLUTION="comfy_nodes.limits",
    NODE_CLASS_MAPPINGS="comfy_nodes.table",
    NODE_DISPLAY_NAME_MAPPINGS="comfy_nodes.table",
)
