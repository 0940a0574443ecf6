"""Triangles as a binary glTF file.

Source: https://registry.khronos.org/glTF/specs/2.0/glTF-2.0.html, chapters 3 and 4.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MAGIC, VERSION = b"glTF", 2
FLOAT, UNSIGNED = 5126, 5125  # types of numbers
VERTICES, INDICES = 34962, 34963  # what a part of the file is for
TRIANGLES = 4


def glb(vertices: Tensor, faces: Tensor, texts: Mapping[str, str]) -> bytes:
    """The file of one mesh.

    Args:
        vertices: [N, 3].
        faces: [M, 3], indices of vertices; triangles with a corner twice are left out.
        texts: What the file carries besides.

    Raises:
        ValueError: There is no triangle.
    """
    first, second, third = faces.unbind(1)
    faces = faces[(first != second) & (second != third) & (third != first)]
    if not faces.numel():
        raise ValueError(f"mesh: expected triangles, found none among {vertices.shape[0]} vertices")
    if int(faces.min()) < 0 or int(faces.max()) >= vertices.shape[0]:
        raise ValueError(
            f"mesh: expected faces of its {vertices.shape[0]} vertices, found indices from "
            f"{int(faces.min())} to {int(faces.max())}"
        )
    points = vertices[: int(faces.max()) + 1].to("cpu", torch.float32).contiguous()
    corners = faces.to("cpu", torch.int32).contiguous()
    data = points.numpy().astype("<f4").tobytes(), corners.numpy().astype("<u4").tobytes()
    text = json.dumps(description(points, corners, texts), separators=(",", ":")).encode()
    body = chunk(b"JSON", text, b" ") + chunk(b"BIN\0", b"".join(data), b"\0")
    return struct.pack("<4sII", MAGIC, VERSION, 12 + len(body)) + body


def chunk(kind: bytes, content: bytes, filler: bytes) -> bytes:
    """A part of the file, filled up to a multiple of four bytes."""
    content += filler * (-len(content) % 4)
    return struct.pack("<I4s", len(content), kind) + content


def description(points: Tensor, corners: Tensor, texts: Mapping[str, str]) -> dict[str, Any]:
    """What the file says of its numbers."""
    sizes = (points.numel() * 4, corners.numel() * 4)
    asset: dict[str, Any] = {"version": "2.0", "generator": "latentloom"}
    if texts:
        asset["extras"] = dict(texts)
    return {
        "asset": asset,
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [
            {"primitives": [{"attributes": {"POSITION": 0}, "indices": 1, "mode": TRIANGLES}]}
        ],
        "buffers": [{"byteLength": sum(sizes)}],
        "bufferViews": [
            {"buffer": 0, "byteOffset": 0, "byteLength": sizes[0], "target": VERTICES},
            {"buffer": 0, "byteOffset": sizes[0], "byteLength": sizes[1], "target": INDICES},
        ],
        "accessors": [
            {
                "bufferView": 0,
                "componentType": FLOAT,
                "count": points.shape[0],
                "type": "VEC3",
                "min": points.amin(dim=0).tolist(),
                "max": points.amax(dim=0).tolist(),
            },
            {
                "bufferView": 1,
                "componentType": UNSIGNED,
                "count": corners.numel(),
                "type": "SCALAR",
            },
        ],
    }
