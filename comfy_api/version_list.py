"""The versions of the interface, oldest first."""

from comfy_api.latest import ComfyAPI_latest
from comfy_api.v0_0_1 import ComfyAPIAdapter_v0_0_1
from comfy_api.v0_0_2 import ComfyAPIAdapter_v0_0_2

supported_versions = [ComfyAPIAdapter_v0_0_1, ComfyAPIAdapter_v0_0_2, ComfyAPI_latest]
