"""Small shared functions."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageFile

import node_helpers


def test_setting_values_copies_the_entries() -> None:
    original = [[torch.zeros(1), {"a": 1}], [torch.zeros(1), {}]]
    changed = node_helpers.conditioning_set_values(original, {"a": 2, "b": 3})
    assert [options for _, options in changed] == [{"a": 2, "b": 3}, {"a": 2, "b": 3}]
    assert original[0][1] == {"a": 1}


def test_appending_adds_to_lists_that_are_there() -> None:
    original = [[torch.zeros(1), {"refs": [1]}], [torch.zeros(1), {}]]
    changed = node_helpers.conditioning_set_values(original, {"refs": [2]}, append=True)
    assert [options["refs"] for _, options in changed] == [[1, 2], [2]]
    assert original[0][1]["refs"] == [1]


def test_pillow_leaves_its_setting_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(OSError, match=r"broken\.png"):
        node_helpers.pillow(Image.open, tmp_path / "broken.png")
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


@pytest.mark.parametrize(
    ("wanted", "given", "result"), [(3, 4, 3), (4, 3, 4), (3, 3, 3), (1, 3, 1)]
)
def test_channels_of_the_source_follow_the_destination(
    wanted: int, given: int, result: int
) -> None:
    destination, source = torch.zeros(1, 2, 2, wanted), torch.zeros(1, 2, 2, given)
    first, second = node_helpers.image_alpha_fix(destination, source)
    assert first.shape[-1] == wanted
    assert second.shape[-1] == result
    if given < wanted:
        assert second[..., -1].min() == 1  # opaque


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)
    expected = hashlib.sha256(b"x" * 3_000_000).hexdigest()
    assert node_helpers.file_digest(str(path)) == expected


def test_short_names_of_types() -> None:
    assert node_helpers.string_to_torch_dtype("bf16") is torch.bfloat16
    assert node_helpers.string_to_torch_dtype("int4") is None
