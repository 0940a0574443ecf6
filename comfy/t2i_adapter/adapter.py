"""T2I adapters, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.t2i_adapter.model import (
    Adapter,
    Adapter_light,
    Downsample,
    ResnetBlock,
    ResnetBlock_light,
    extractor,
)
from comfy.public import write_through

write_through(__name__)
