"""A picture of the losses of a training run."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw
from torch import Tensor

WIDTH, HEIGHT, MARGIN = 800, 480, 60
LINE = (31, 119, 180)


def loss_graph(losses: list[float]) -> Tensor:
    """The losses [1, H, W, 3] as a line over the steps, with its ends written at the axes."""
    lowest, highest = min(losses), max(losses)
    span = (highest - lowest) or 1.0
    right, bottom = WIDTH - MARGIN // 2, HEIGHT - MARGIN
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    draw.line([(MARGIN, MARGIN // 2), (MARGIN, bottom), (right, bottom)], fill="black", width=2)
    across = (right - MARGIN) / max(len(losses) - 1, 1)
    down = bottom - MARGIN // 2
    points = [
        (MARGIN + across * step, bottom - down * (loss - lowest) / span)
        for step, loss in enumerate(losses)
    ]
    if len(points) == 1:
        points *= 2
    draw.line(points, fill=LINE, width=2)
    draw.text((4, MARGIN // 2), f"{highest:.4g}", fill="black")
    draw.text((4, bottom - 10), f"{lowest:.4g}", fill="black")
    draw.text((MARGIN, bottom + 8), "1", fill="black")
    draw.text((right, bottom + 8), f"{len(losses)}", fill="black", anchor="ra")
    draw.text((WIDTH // 2, bottom + 24), "steps", fill="black", anchor="ma")
    raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return raw.reshape(1, HEIGHT, WIDTH, 3).float() / 255.0
