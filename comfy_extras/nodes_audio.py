"""The nodes for sound; the parts are in `comfy_extras.audio`."""

from __future__ import annotations

from comfy_extras.audio import editing, files, latents
from comfy_extras.extension import entrypoint_of

comfy_entrypoint = entrypoint_of(*files.NODES, *editing.NODES, *latents.NODES)
