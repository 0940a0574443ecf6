"""The parts of the interface object: progress of the running node, replaced nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest.io.replacement import NodeReplace
from comfy_api.latest.replacements import register_replacement
from comfy_execution.context import check_interrupt, get_executing_context
from comfy_execution.progress import get_progress_state

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

PREVIEW_FORMAT = "JPEG"
PREVIEW_PIXELS = 512  # longest side of a preview in the editor


class Execution:
    """The part of the interface that concerns the node that is running."""

    HAS_SYNC_TWIN = True

    async def set_progress(
        self,
        value: float,
        max_value: float,
        node_id: str | None = None,
        preview_image: Image | Tensor | None = None,
        ignore_size_limit: bool = False,
    ) -> None:
        """Reports how far a node is, with a picture if there is one.

        Args:
            value, max_value: Work done and work in all, in any unit.
            node_id: The node; None for the one that is running.
            preview_image: A PIL image, or a tensor `[H, W, C]` or `[B, H, W, C]` in 0..1, of
                which the first picture is shown.
            ignore_size_limit: Whether the picture is sent at its full size.
        Raises:
            ValueError: no node is running here and none was named.
            BaseException: the interruption, if the prompt is to stop.
        """
        check_interrupt()
        if node_id is None:
            context = get_executing_context()
            if context is None:
                raise ValueError(
                    "set_progress was called outside of a running node; give it a node_id"
                )
            node_id = context.node_id
        preview = None
        if preview_image is not None:
            size = None if ignore_size_limit else PREVIEW_PIXELS
            preview = (PREVIEW_FORMAT, _as_pil(preview_image), size)
        get_progress_state().report(node_id, value, max_value, preview)


def _as_pil(picture: Any) -> Image:
    """A PIL image of a picture in either form."""
    from PIL.Image import Image as PilImage

    if isinstance(picture, PilImage):
        return picture
    from comfy_api.latest.ui.images import tensor_to_pil

    return tensor_to_pil(picture[0] if picture.ndim == 4 else picture)


class NodeReplacement:
    """The part of the interface that concerns nodes which took the place of others."""

    HAS_SYNC_TWIN = True

    async def register(self, node_replace: NodeReplace) -> None:
        """Tells editor and server how a node that is gone is replaced; see `NodeReplace`."""
        register_replacement(node_replace)
