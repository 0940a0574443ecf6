"""Nodes that prepare a training set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import folder_paths
from comfy_extras.dataset import files, pictures, sets, texts, training


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """Input and output folders of this test."""
    before = folder_paths.get_input_directory(), folder_paths.get_output_directory()
    for name in ("input", "output"):
        (tmp_path / name).mkdir()
    folder_paths.set_input_directory(str(tmp_path / "input"))
    folder_paths.set_output_directory(str(tmp_path / "output"))
    yield tmp_path
    folder_paths.set_input_directory(before[0])
    folder_paths.set_output_directory(before[1])


def both(output: Any) -> tuple[Any, Any]:
    """The two results of a node."""
    return output[0], output[1]


def picture(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.rand(1, rows, columns, 3, generator=torch.Generator().manual_seed(seed))


def test_texts_change_as_their_names_say() -> None:
    assert texts.TextToLowercase.execute("A Cat")[0] == "a cat"
    assert texts.TextToUppercase.execute("A Cat")[0] == "A CAT"
    assert texts.TruncateText.execute("a cat", 3)[0] == "a c"
    assert texts.AddTextPrefix.execute("cat", "a ")[0] == "a cat"
    assert texts.AddTextSuffix.execute("cat", " sits")[0] == "cat sits"
    assert texts.ReplaceText.execute("a cat", "cat", "dog")[0] == "a dog"
    assert texts.ReplaceText.execute("cat", "", "-")[0] == "cat"
    assert texts.StripWhitespace.execute("  cat\n")[0] == "cat"
    assert texts.MergeTextLists.execute(["a", "b"])[0] == ["a", "b"]


def test_sides_are_fitted_in_proportion() -> None:
    wide = picture(20, 40)
    assert pictures.ResizeImagesByShorterEdge.execute(wide, 10)[0].shape == (1, 10, 20, 3)
    assert pictures.ResizeImagesByLongerEdge.execute(wide, 10)[0].shape == (1, 5, 10, 3)
    tall = picture(40, 1)
    assert pictures.ResizeImagesByLongerEdge.execute(tall, 10)[0].shape == (1, 10, 1, 3)


def test_crops_stay_inside() -> None:
    image = picture(10, 12)
    assert torch.equal(pictures.CenterCropImages.execute(image, 4, 6)[0], image[:, 2:8, 4:8])
    assert pictures.CenterCropImages.execute(image, 100, 100)[0].shape == image.shape
    crop = pictures.RandomCropImages.execute
    first, second = crop(image, 4, 4, 3)[0], crop(image, 4, 4, 3)[0]
    assert torch.equal(first, second)
    assert first.shape == (1, 4, 4, 3)
    assert any(not torch.equal(first, crop(image, 4, 4, seed)[0]) for seed in range(5))
    assert crop(image, 4, 4, 2**64 - 1)[0].shape == (1, 4, 4, 3)


def test_levels_are_adjusted() -> None:
    grey = torch.full((1, 2, 2, 3), 0.75)
    assert torch.allclose(pictures.AdjustBrightness.execute(grey, 0.5)[0], torch.tensor(0.375))
    assert torch.allclose(pictures.AdjustContrast.execute(grey, 2.0)[0], torch.tensor(1.0))
    assert torch.allclose(pictures.NormalizeImages.execute(grey, 0.5, 0.5)[0], torch.tensor(0.5))


def test_the_seed_decides_the_order_of_pictures_and_texts_together() -> None:
    images = [picture(2, 2, n) for n in range(8)]
    names = [str(n) for n in range(8)]
    shuffled, captions = both(sets.ShuffleImageTextDataset.execute(images, names, [5]))
    assert captions != names
    assert all(torch.equal(one, images[int(text)]) for one, text in zip(shuffled, captions))
    alone = sets.ShuffleDataset.execute(images, [5])[0]
    assert all(torch.equal(a, b) for a, b in zip(alone, shuffled))
    with pytest.raises(
        ValueError, match=r"texts: expected as many as there are pictures \(8\), found 1"
    ):
        sets.ShuffleImageTextDataset.execute(images, ["one"], [5])


def test_pictures_that_look_alike_are_left_out() -> None:
    first, other = picture(32, 32, 1), picture(32, 32, 2)
    nearly = (first + 0.001).clamp(0, 1)
    kept = sets.ImageDeduplication.execute([torch.cat([first, nearly]), other], [0.95])[0]
    assert len(kept) == 2
    assert torch.equal(kept[0], first)
    assert torch.equal(kept[1], other)


def test_a_sheet_has_room_for_every_picture() -> None:
    images = [torch.ones(1, 8, 8, 3)] * 3
    sheet = sets.ImageGrid.execute(images, [2], [32], [40], [4])[0]
    assert sheet.shape == (1, 84, 68, 3)
    assert sheet[0, 20, 34].sum() == 0  # between two cells
    assert sheet[0, 60, 50].sum() == 0  # no fourth picture
    assert sheet[0, 60, 10].sum() == pytest.approx(3.0)
    with pytest.raises(ValueError, match="no pictures"):
        sets.ImageGrid.execute([], [2], [32], [40], [4])


def test_pictures_and_texts_come_back_from_a_folder(folders: Path) -> None:
    images = [torch.ones(1, 4, 6, 3), torch.zeros(1, 4, 6, 3)]
    files.SaveImageTextDataSetToFolder.execute(images, ["white", "black"], ["set"], ["p"])
    (folders / "output/set").rename(folders / "input/set")
    loaded, captions = both(files.LoadImageTextDataSetFromFolder.execute("set"))
    assert captions == ["white", "black"]
    assert torch.equal(loaded[0], images[0])
    files.SaveImageDataSetToFolder.execute(images, ["plain"], ["p"])
    assert len(list((folders / "output/plain").iterdir())) == 2


def test_a_numbered_subfolder_counts_so_often(folders: Path) -> None:
    for name in ("3_cats", "dogs"):
        (folders / "input/set" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folders / "input/set" / name / "a.png")
    (folders / "input/set/3_cats/a.txt").write_text(" a cat \n", encoding="utf-8")
    _, captions = both(files.LoadImageTextDataSetFromFolder.execute("set"))
    assert captions == ["a cat"] * 3 + [""]


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere", "a/../../b"])
def test_no_name_leads_out_of_the_folders(name: str, folders: Path) -> None:
    del folders
    image = [torch.zeros(1, 2, 2, 3)]
    with pytest.raises(ValueError, match="outside"):
        files.SaveImageDataSetToFolder.execute(image, [name], ["p"])
    with pytest.raises(ValueError, match="outside"):
        files.LoadImageDataSetFromFolder.execute(name)
    with pytest.raises(ValueError, match="plain name"):
        files.SaveImageDataSetToFolder.execute(image, ["set"], ["../p"])


def test_a_training_set_survives_saving_in_parts(folders: Path) -> None:
    latents = [{"samples": torch.full((1, 4, 2, 2), float(n))} for n in range(3)]
    conds = [
        [[torch.full((1, 2, 3), float(n)), {"pooled_output": torch.ones(1, 3)}]] for n in range(3)
    ]
    training.SaveTrainingDataset.execute(latents, conds, ["t"], [2])
    assert sorted(p.name for p in (folders / "output/t").iterdir()) == [
        "metadata.json",
        "shard_0000.pkl",
        "shard_0001.pkl",
    ]
    back, back_conds = both(training.LoadTrainingDataset.execute("t"))
    assert [float(one["samples"].mean()) for one in back] == [0.0, 1.0, 2.0]
    assert torch.equal(back_conds[2][0][0], conds[2][0][0])
    with pytest.raises(FileNotFoundError, match="no training set"):
        training.LoadTrainingDataset.execute("absent")


def test_latents_are_grouped_by_size() -> None:
    latents = [{"samples": torch.zeros(2, 4, 2, 2)}, {"samples": torch.zeros(1, 4, 3, 2)}]
    conds = [[["a", {}], ["b", {}]], [["c", {}]]]
    groups, kept = both(training.ResolutionBucket.execute(latents, conds))
    assert [group["samples"].shape for group in groups] == [(2, 4, 2, 2), (1, 4, 3, 2)]
    assert [[entry[0] for entry in group] for group in kept] == [["a", "b"], ["c"]]
    with pytest.raises(ValueError, match=r"conditioning: expected .* latents \(3\), found 2"):
        training.ResolutionBucket.execute(latents, conds[:1])


def test_pictures_and_texts_are_encoded() -> None:
    asked: list[str] = []

    def encode(tokens: str) -> Any:
        asked.append(tokens)
        return [[tokens, {}]]

    clip = SimpleNamespace(tokenize=lambda text: text, encode_from_tokens_scheduled=encode)
    vae = SimpleNamespace(encode=lambda pixels: pixels.movedim(-1, 1))
    images = [torch.zeros(1, 2, 2, 4)] * 2
    latents, conds = both(training.MakeTrainingDataset.execute(images, [vae], [clip], ["cat"]))
    assert latents[0]["samples"].shape == (1, 3, 2, 2)
    assert [one[0][0] for one in conds] == ["cat", "cat"]
    assert asked == ["cat"]
    with pytest.raises(
        ValueError, match=r"texts: expected one, or as many .* pictures \(2\), found 3"
    ):
        training.MakeTrainingDataset.execute(images, [vae], [clip], ["a", "b", "c"])


def test_a_subfolder_cannot_ask_for_endless_repeats(folders: Path) -> None:
    (folders / "input" / "set" / ("9" * 30 + "_a")).mkdir(parents=True)
    with pytest.raises(ValueError, match="at most 10000"):
        files.LoadImageTextDataSetFromFolder.execute("set")
    assert files.repeats_of("²_a") == 1
