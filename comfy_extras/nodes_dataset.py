"""The nodes that prepare a training set; the parts are in `comfy_extras.dataset`."""

from __future__ import annotations

from comfy_extras.dataset import files, pictures, sets, texts, training
from comfy_extras.extension import entrypoint_of

PARTS = (files, pictures, texts, sets, training)

comfy_entrypoint = entrypoint_of(*[node for part in PARTS for node in part.NODES])
