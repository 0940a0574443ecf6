"""What every model family shares, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.families.family import ClipTarget
from comfy.families.family import ModelFamily as BASE
from comfy.public import write_through

write_through(__name__)
