"""Conditionings in files, and the attention of one model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import folder_paths
from comfy.nn import attention
from comfy.weights import errors
from comfy_extras.nodes_attention_backend import ModelAttentionBackend
from comfy_extras.nodes_conditioning_files import ConditioningLoader, SaveConditioning
from tests.comfy.sampling.support import ClosedFormModel, patcher


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The output folder and the folder of embeddings in one."""
    before = folder_paths.get_output_directory()
    folder_paths.set_output_directory(str(tmp_path))
    kept = {
        **folder_paths.folder_names_and_paths,
        "embeddings": ([str(tmp_path)], {".safetensors", ".pt"}),
    }
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", kept)
    yield tmp_path
    folder_paths.set_output_directory(before)


def test_a_saved_conditioning_comes_back_whole(folder: Path) -> None:
    main = torch.randn(1, 5, 8)
    latents = [torch.randn(1, 4, 2, 2) for _ in range(11)]
    options = {
        "pooled_output": main[:, 0], "guidance": 3.5, "is_edit": True, "name": "a", "count": 2,
        "reference_latents": latents, "nothing": None,
    }  # fmt: skip
    given = [[main[:, 1:], options]]
    assert SaveConditioning.execute(given, "texts")[0] is given
    ((states, found),) = ConditioningLoader.execute("texts_00001_.safetensors")[0]
    assert torch.equal(states, main[:, 1:])
    assert torch.equal(found["pooled_output"], main[:, 0])
    assert all(map(torch.equal, found["reference_latents"], latents))
    plain = {name: found[name] for name in ("guidance", "is_edit", "name", "count")}
    assert plain == {"guidance": 3.5, "is_edit": True, "name": "a", "count": 2}
    assert found["is_edit"] is True
    assert "nothing" not in found


def test_any_file_with_a_conditioning_is_read(folder: Path) -> None:
    tensors = {"conditioning": torch.ones(1, 2, 4), "extra": torch.zeros(1, 3)}
    safetensors.torch.save_file(tensors, folder / "other.safetensors")
    ((states, found),) = ConditioningLoader.execute("other.safetensors")[0]
    assert states.shape == (1, 2, 4)
    assert list(found) == ["extra"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([[torch.ones(1, 2, 4), {}]] * 2, "expected one entry, found 2"),
        ([], "expected one entry, found 0"),
        ([[torch.ones(1, 2, 4), {"control": object()}]], "'control' cannot be saved.*found object"),
        ([[torch.ones(1, 2, 4), {"conditioning": torch.ones(1)}]], "would take the place"),
        ([[torch.ones(1, 2, 4), {"area": [1, 2]}]], "'area' cannot be saved.*found list"),
    ],
)
def test_what_no_file_can_hold_is_named(folder: Path, given: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SaveConditioning.execute(given, "texts")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "header", "reason"),
    [
        (
            {"clip_l": torch.ones(2, 4)},
            None,
            r"expected a tensor 'conditioning'.*keys \['clip_l'\]",
        ),
        ({"conditioning": torch.ones(1, 2, 4, dtype=torch.long)}, None, "floating point.*int64"),
        ({"conditioning": torch.ones(0, 2, 4)}, None, r"found \(0, 2, 4\)"),
        ({"conditioning": torch.ones(4)}, None, r"expected a tensor.*found \(4,\)"),
        ({"conditioning": torch.ones(1, 2, 4)}, "[1]", "expected a JSON object.*found '\\[1\\]'"),
        ({"conditioning": torch.ones(1, 2, 4)}, "{", "expected a JSON object"),
        ({"conditioning": torch.ones(1, 2, 4)}, '{"hooks": {}}', "of numbers, switches and texts"),
    ],
)
def test_a_file_without_a_conditioning_is_named(
    folder: Path, tensors: Any, header: str | None, reason: str
) -> None:
    metadata = {"conditioning_options": header} if header else None
    safetensors.torch.save_file(tensors, folder / "other.safetensors", metadata)
    with pytest.raises(ValueError, match=reason):
        ConditioningLoader.execute("other.safetensors")


@pytest.mark.parametrize("more", [{"hooks": {"a": torch.ones(1)}}, {"control": "x"}])
def test_pickled_files_give_nothing_but_tensors(folder: Path, more: dict[Any, Any]) -> None:
    torch.save({"conditioning": torch.ones(1, 2, 4), **more}, folder / "other.pt")
    with pytest.raises(ValueError, match="expected tensors by name, found"):
        ConditioningLoader.execute("other.pt")


def test_pickled_files_run_nothing(folder: Path) -> None:
    class Calls:
        def __reduce__(self) -> Any:
            return Path.touch, (folder / "ran",)

    torch.save({"conditioning": torch.ones(1, 2, 4), "a": Calls()}, folder / "other.pt")
    with pytest.raises(errors.UnsafePickleError):
        ConditioningLoader.execute("other.pt")
    assert not (folder / "ran").exists()


def test_a_model_attends_by_the_chosen_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        attention, "attention_split", attention._public(lambda *a: calls.append(a), "split")
    )
    model = patcher(ClosedFormModel("EPS", {}))
    view = ModelAttentionBackend.execute(model, "pytorch attention")[0]
    q = torch.randn(1, 4, 8)
    options = view.model_options["transformer_options"]
    made = attention.attention_split(q, q, q, 2, transformer_options=options)
    torch.testing.assert_close(made, attention.attention_pytorch(q, q, q, 2))
    assert not calls
    assert attention.OVERRIDE_KEY not in model.model_options.get("transformer_options", {})


def test_attention_that_is_not_here_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = patcher(ClosedFormModel("EPS", {}))
    with caplog.at_level(logging.WARNING):
        view = ModelAttentionBackend.execute(model, "comfy kitchen attention")[0]
    assert "comfy kitchen attention is not here" in caplog.text
    assert attention.OVERRIDE_KEY in view.model_options["transformer_options"]
