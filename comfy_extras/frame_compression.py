"""Pictures with the losses of video compression."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from comfy_nodes.picture_basics import colours_of

QUALITY = "crf"  # the encoder's own name for how much is lost


def compressed(images: Tensor, amount: int) -> Tensor:
    """Pictures [B, H, W, C], each encoded as a video of one frame and decoded again.

    Args:
        amount: Rate factor of H.264, 0 to 51 in use; 0 changes nothing.

    Returns:
        Pictures whose sides are even, as the encoder needs them.

    Raises:
        ValueError: A side has one pixel only.
    """
    if amount == 0:
        return images
    if min(images.shape[1:3]) < 2:
        raise ValueError(
            f"image: expected sides of at least 2 pixels, found {images.shape[2]} x "
            f"{images.shape[1]}"
        )
    return torch.stack([_one_frame(image, amount) for image in images])


def _one_frame(image: Tensor, amount: int) -> Tensor:
    import av

    height, width = (side // 2 * 2 for side in image.shape[:2])
    pixels = (
        (colours_of(image[:height, :width]) * 255.0).clamp(0, 255).to("cpu", torch.uint8).numpy()
    )
    file = BytesIO()
    with av.open(file, mode="w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=1)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {QUALITY: str(amount), "preset": "veryfast"}
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    file.seek(0)
    with av.open(file, mode="r") as reader:
        decoded = next(reader.decode(reader.streams.video[0]))
    return torch.from_numpy(decoded.to_ndarray(format="rgb24")).to(image) / 255.0
