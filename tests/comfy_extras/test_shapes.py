"""Meshes of voxels, and the files they are saved in."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import folder_paths
from comfy_api.latest import Types
from comfy_extras.nodes_hunyuan3d import SaveGLB, VoxelToMesh, VoxelToMeshBasic
from comfy_extras.shapes.glb import glb

BOTH = ("basic", "surface net")


def mesh(values: Tensor, algorithm: str, threshold: float = 0.5) -> tuple[Tensor, Tensor]:
    made = VoxelToMesh.execute(Types.VOXEL(values[None]), algorithm, threshold)[0]
    return made.vertices[0], made.faces[0]


def volume(vertices: Tensor, faces: Tensor) -> float:
    """What a closed surface encloses; positive if its triangles are counterclockwise outside."""
    a, b, c = vertices[faces].unbind(1)
    return float((a * torch.linalg.cross(b, c)).sum() / 6)


def is_closed(faces: Tensor) -> bool:
    """Whether every edge is passed as often in both directions."""
    edges = torch.cat([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).tolist()
    there, back = sorted(map(tuple, edges)), sorted((b, a) for a, b in edges)
    return there == back


def test_a_voxel_is_a_cube() -> None:
    values = torch.zeros(2, 4, 3)
    values[1, 2, 0] = 1.0
    vertices, faces = mesh(values, "basic")
    assert vertices.shape == (8, 3)
    assert faces.shape == (12, 3)
    # The longest side, height, goes from -1 to 1: a voxel's side is 0.5.
    assert vertices.amin(dim=0).tolist() == [-1.0, 0.0, -0.5]
    assert vertices.amax(dim=0).tolist() == [-0.5, 0.5, 0.0]
    assert volume(vertices, faces) == pytest.approx(0.125)
    same = VoxelToMeshBasic.execute(Types.VOXEL(values[None]), 0.5)[0]
    assert torch.equal(same.vertices[0], vertices)
    assert torch.equal(same.faces[0], faces)


@pytest.mark.parametrize("algorithm", BOTH)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 5), (3, 4, 5), (6, 6, 6)])
def test_surfaces_are_closed_and_face_outside(algorithm: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.rand(shape, generator=generator) + 0.01
    values[0, 0, 0] = 0.9
    for threshold in (0.0, 0.3, -0.5):
        vertices, faces = mesh(values, algorithm, threshold)
        assert is_closed(faces)
        assert volume(vertices, faces) > 0
        assert torch.isfinite(vertices).all()
        if algorithm == "basic":
            voxel = (2 / max(shape)) ** 3
            inside = float((values > threshold).sum())
            assert volume(vertices, faces) == pytest.approx(inside * voxel, rel=1e-4)


def test_a_surface_net_follows_a_ball() -> None:
    axis = torch.arange(24) + 0.5 - 12
    distance = (axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2).sqrt()
    vertices, faces = mesh((8.0 - distance) / 8 + 0.5, "surface net")
    radius = vertices.norm(dim=1) * 12
    assert radius.sub(8.0).abs().max() < 0.35
    assert volume(vertices, faces) * 12**3 == pytest.approx(4 / 3 * torch.pi * 512, rel=0.03)
    blocky, _ = mesh((8.0 - distance) / 8 + 0.5, "basic")
    assert (blocky.norm(dim=1) * 12 - 8.0).abs().max() > 0.35


def test_nothing_inside_is_said_with_its_numbers() -> None:
    with pytest.raises(ValueError, match=r"threshold: .* from 0 to 0\.25, found 0\.6"):
        VoxelToMesh.execute(Types.VOXEL(torch.tensor([[[[0.0, 0.25]]]])), "basic", 0.6)
    with pytest.raises(ValueError, match=r"voxel: .*\(3, 3, 3\)"):
        VoxelToMeshBasic.execute(Types.VOXEL(torch.ones(3, 3, 3)), 0.6)


def read(data: bytes) -> tuple[dict[str, Any], Tensor, Tensor]:
    magic, version, length = struct.unpack_from("<4sII", data)
    assert (magic, version, length) == (b"glTF", 2, len(data))
    size, kind = struct.unpack_from("<I4s", data, 12)
    assert kind == b"JSON"
    assert size % 4 == 0
    text = json.loads(data[20 : 20 + size])
    binary_size, binary = struct.unpack_from("<I4s", data, 20 + size)
    assert binary == b"BIN\0"
    body = bytearray(data[28 + size :])
    assert len(body) == binary_size
    parts = []
    for view, dtype in zip(text["bufferViews"], (torch.float32, torch.int32)):
        begin = view["byteOffset"]
        part = body[begin : begin + view["byteLength"]]
        parts.append(torch.frombuffer(part, dtype=dtype).reshape(-1, 3))
    return text, parts[0], parts[1]


def test_a_file_holds_the_mesh_and_the_workflow() -> None:
    vertices = torch.rand(5, 3)
    faces = torch.tensor([[0, 1, 2], [1, 3, 2], [0, 0, 0], [1, 1, 2]])
    text, points, corners = read(glb(vertices, faces, {"prompt": "{}"}))
    assert torch.equal(points, vertices[:4])
    assert corners.tolist() == [[0, 1, 2], [1, 3, 2]]
    assert text["asset"]["extras"] == {"prompt": "{}"}
    accessor = text["accessors"][0]
    assert accessor["count"] == 4
    assert accessor["max"] == pytest.approx(vertices[:4].amax(dim=0).tolist())
    assert text["accessors"][1]["count"] == 6
    with pytest.raises(ValueError, match="mesh: expected triangles, found none among 5 vertices"):
        glb(vertices, faces[2:3], {})
    with pytest.raises(ValueError, match="mesh: expected faces of its 2 vertices"):
        glb(vertices[:2], faces, {})


def test_every_mesh_of_a_batch_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    values = torch.zeros(2, 3, 3, 3)
    values[0, 1, 1, 1] = 1.0
    values[1, :, 1, 1] = 1.0
    made = VoxelToMeshBasic.execute(Types.VOXEL(values), 0.5)[0]
    assert made.vertices.shape[0] == made.faces.shape[0] == 2
    shown = SaveGLB.execute(made, "mesh/a").ui["3d"]
    assert [one["filename"] for one in shown] == ["a_00001_.glb", "a_00002_.glb"]
    assert {one["subfolder"] for one in shown} == {"mesh"}
    found = [read((tmp_path / "mesh" / one["filename"]).read_bytes()) for one in shown]
    assert [one[1].shape[0] for one in found] == [8, 16]
    assert [one[2].shape[0] for one in found] == [12, 28]
    again = SaveGLB.execute(made, "mesh/a").ui["3d"]
    assert again[0]["filename"] == "a_00003_.glb"
