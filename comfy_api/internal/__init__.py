"""What the versions of the interface are built from. Not for authors of nodes."""

from comfy_api.internal.api_registry import ComfyAPIBase
from comfy_api.internal.async_to_sync import create_sync_class

__all__ = ["ComfyAPIBase", "create_sync_class"]
