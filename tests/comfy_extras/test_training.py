"""Training: losses fall, and what was trained does the same when it is loaded again."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import folder_paths
from comfy import loading
from comfy.interrupt import (
    InterruptProcessingException,
    interrupt_current_processing,
)
from comfy_extras.nodes_train import LoraModelLoader, LossGraphNode, SaveLoRA, TrainLoraNode
from comfy_extras.training.factors import ALGORITHMS, TrainedAdapter
from comfy_nodes.loaders import LoraLoader, LoraLoaderModelOnly
from comfy_nodes.sampling import common_ksampler
from tests.support import tiny_checkpoint


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A small model and what it is to learn, made where no gradients can be taken."""
    with torch.inference_mode():
        path = tiny_checkpoint.write(tmp_path_factory.mktemp("train") / "tiny.safetensors")
        found = loading.load_checkpoint_guess_config(str(path))
        assert found.clip is not None
        texts = ("a red thing", "a blue thing")
        generator = torch.Generator().manual_seed(0)
        known = SimpleNamespace(
            model=found.model,
            clip=found.clip,
            latents=[{"samples": torch.randn(1, 4, 8, 8, generator=generator)} for _ in texts],
            positive=[
                found.clip.encode_from_tokens_scheduled(found.clip.tokenize(text)) for text in texts
            ],
        )
    known.loss = loss_of(known, known.model)
    return known


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder of this test that LoRAs are loaded from."""
    entry = ([str(tmp_path / "loras")], {".safetensors"})
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "loras", entry)
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))
    return tmp_path


DEFAULTS = {
    "batch_size": 1, "grad_accumulation_steps": 1, "steps": 12, "learning_rate": 0.02, "rank": 4,
    "optimizer": "AdamW", "loss_function": "MSE", "seed": 1, "training_dtype": "fp32",
    "lora_dtype": "fp32", "algorithm": "LoRA", "gradient_checkpointing": False,
    "existing_lora": "[None]", "bucket_mode": False,
}  # fmt: skip


def train(loaded: SimpleNamespace, model: Any = None, **changes: Any) -> Any:
    """The node's outputs, run as the executor does."""
    lists = {name: changes.pop(name, getattr(loaded, name)) for name in ("latents", "positive")}
    given = {"model": model or loaded.model, **DEFAULTS, **changes}
    with torch.inference_mode():
        return TrainLoraNode.execute(**lists, **{name: [value] for name, value in given.items()})


def loss_of(loaded: SimpleNamespace, model: Any) -> float:
    """The mean loss over the same levels and noises."""
    losses = train(loaded, model, steps=4, learning_rate=1e-7, seed=7)[2]["loss"]
    return float(sum(losses) / len(losses))


def sampled(model: Any, positive: Any) -> Tensor:
    latent = {"samples": torch.zeros(1, 4, 8, 8)}
    with torch.inference_mode():
        out = common_ksampler(model, 5, 1, 1.0, "euler", "normal", positive, positive, latent)
    samples: Tensor = out[0]["samples"]
    return samples


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_lowers_the_loss_and_what_is_loaded_does_the_same(
    algorithm: str, loaded: SimpleNamespace, folders: Path
) -> None:
    text = loaded.positive[0]
    before = sampled(loaded.model, text)
    made = train(loaded, algorithm=algorithm)
    assert len(made[2]["loss"]) == made[3] == 12
    assert loss_of(loaded, made[0]) < 0.9 * loaded.loss
    after = sampled(made[0], text)
    assert not torch.allclose(after, before, atol=0.01)
    assert torch.equal(sampled(LoraModelLoader.execute(loaded.model, made[1], 1.0)[0], text), after)
    SaveLoRA.execute(made[1], "loras/mine", made[3])
    SaveLoRA.execute(made[1], "loras/other")
    names = {"mine_12_steps_00001_.safetensors", "other_00001_.safetensors"}
    assert {file.name for file in (folders / "loras").iterdir()} == names
    with torch.inference_mode():
        for name in names:
            (view,) = LoraLoaderModelOnly().load_lora_model_only(loaded.model, name, 1.0)
            assert torch.equal(sampled(view, text), after)
            both = LoraLoader().load_lora(loaded.model, loaded.clip, name, 1.0, 1.0)
            assert torch.equal(sampled(both[0], text), after)
    # The model itself is as it was.
    assert torch.equal(sampled(loaded.model, text), before)
    assert LoraModelLoader.execute(loaded.model, made[1], 0.0)[0] is loaded.model


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True, "batch_size": 2},
        {"optimizer": "Adam"},
        {"optimizer": "SGD", "learning_rate": 0.02},
        {"optimizer": "RMSprop", "learning_rate": 0.002},
        {"loss_function": "L1"},
        {"loss_function": "Huber"},
        {"loss_function": "SmoothL1"},
        {"training_dtype": "bf16", "lora_dtype": "bf16"},
        {"grad_accumulation_steps": 2, "learning_rate": 0.05},
        {"rank": 128},
        {"batch_size": 10000},
        {"seed": 2**64 - 1},
    ],
    ids=str,
)
def test_every_way_of_training_lowers_the_loss(
    changes: dict[str, Any], loaded: SimpleNamespace
) -> None:
    made = train(loaded, **{"steps": 6, **changes})
    assert loss_of(loaded, made[0]) < loaded.loss


def test_the_same_seed_trains_the_same_with_and_without_recomputing(
    loaded: SimpleNamespace,
) -> None:
    first, second, twice, other = (
        train(loaded, steps=3, **changes)
        for changes in ({}, {}, {"gradient_checkpointing": True}, {"seed": 2})
    )
    assert first[2] == second[2]
    assert all(torch.equal(tensor, second[1][key]) for key, tensor in first[1].items())
    assert twice[2]["loss"] == pytest.approx(first[2]["loss"], rel=1e-4)
    assert other[2] != first[2]


def test_training_goes_on_with_a_saved_lora(loaded: SimpleNamespace, folders: Path) -> None:
    for algorithm in ("LoKr", "LoRA"):
        made = train(loaded, algorithm=algorithm)
        SaveLoRA.execute(made[1], f"loras/{algorithm}", made[3])
        (name,) = folder_paths.get_filename_list("loras")
        more = train(loaded, existing_lora=name, steps=3)
        assert more[3] == 15
        assert more[1].keys() == made[1].keys()
        again = train(loaded, existing_lora=name, steps=1, learning_rate=1e-7)
        for key, tensor in made[1].items():
            assert torch.allclose(again[1][key], tensor, atol=1e-5)
        (folders / "loras" / name).unlink()


def test_files_that_training_cannot_go_on_with_are_refused(
    loaded: SimpleNamespace, folders: Path
) -> None:
    key = "diffusion_model.middle_block.0.in_layers.2"
    files = {
        "foreign": ({"other.lora_up.weight": torch.ones(1)}, "without a weight of it"),
        "unknown": ({f"{key}.strange": torch.ones(1)}, "no adapter is known that has strange"),
    }
    for name, (tensors, reason) in files.items():
        SaveLoRA.execute(tensors, f"loras/{name}")
        with pytest.raises(ValueError, match=f"existing_lora: .*{reason}"):
            train(loaded, existing_lora=f"{name}_00001_.safetensors")


def test_texts_go_with_their_latents(loaded: SimpleNamespace) -> None:
    whole = {"samples": torch.cat([one["samples"] for one in loaded.latents])}
    joined = [entry for one in loaded.positive for entry in one]
    one_text = [loaded.positive[0]]
    apart = train(loaded, steps=3)[2]
    for latents, positive in (
        ([whole], loaded.positive),
        ([whole], [joined]),
        (loaded.latents, [joined]),
    ):
        for bucket_mode in (False, True):
            made = train(
                loaded, steps=3, latents=latents, positive=positive, bucket_mode=bucket_mode
            )
            if not bucket_mode:
                assert made[2] == apart
    assert train(loaded, steps=3, positive=one_text)[2] != apart
    with pytest.raises(ValueError, match=r"positive: expected one .* of 2 latents, found 3"):
        train(loaded, positive=loaded.positive + one_text)
    with pytest.raises(ValueError, match="latents: expected at least one latent"):
        train(loaded, latents=[{"samples": torch.zeros(0, 4, 8, 8)}])


def test_latents_of_several_sizes_are_trained_together(loaded: SimpleNamespace) -> None:
    latents = [*loaded.latents, {"samples": torch.ones(1, 4, 6, 10)}]
    for bucket_mode in (False, True):
        made = train(
            loaded, steps=4, latents=latents, positive=[loaded.positive[0]], bucket_mode=bucket_mode
        )
        assert len(made[2]["loss"]) == 4
    with pytest.raises(ValueError, match="16 channels"):
        train(loaded, latents=[{"samples": torch.ones(2, 16, 8, 8)}])


def test_a_loss_that_is_no_number_is_said_with_the_way_out(loaded: SimpleNamespace) -> None:
    with pytest.raises(ArithmeticError, match=r"the loss of step \d+ .* lower learning_rate"):
        train(loaded, latents=[{"samples": torch.full((2, 4, 8, 8), torch.nan)}])


def test_a_last_step_into_no_number_is_said_too(loaded: SimpleNamespace) -> None:
    with pytest.raises(ArithmeticError, match="what was trained after step 1 is no number; lower"):
        train(loaded, steps=1, optimizer="RMSprop", learning_rate=3e38)


def test_a_cancelled_run_leaves_the_model_as_it_was(loaded: SimpleNamespace) -> None:
    before = sampled(loaded.model, loaded.positive[0])
    interrupt_current_processing()
    with pytest.raises(InterruptProcessingException):
        train(loaded)
    assert torch.equal(sampled(loaded.model, loaded.positive[0]), before)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (12, 8, 3, 3), (6, 4, 3), (1, 64, 1, 1)])
def test_new_factors_change_nothing_yet(algorithm: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for rank in (1, 4, 128):
        few = min(rank, shape[0])
        tensors = ALGORITHMS[algorithm](shape, few, generator)
        weight = torch.randn(shape)
        adapter = TrainedAdapter("w", tensors, torch.float32)
        assert torch.allclose(adapter(weight), weight, atol=1e-6)
        assert sum(p.abs().sum() for p in adapter.parameters()) > 0 or algorithm == "OFT"


def test_losses_are_drawn(folders: Path) -> None:
    for losses in ([0.5], [0.5, 0.5], [3.0, 1.0, 2.0, 0.25]):
        shown = LossGraphNode.execute({"loss": losses}, "graph").ui.as_dict()["images"][0]
        assert re.fullmatch(r"graph_0000\d_\.png", shown["filename"])
        assert shown["type"] == "temp"
        with Image.open(folders / shown["filename"]) as image:
            assert image.size == (800, 480)
            colours = {colour for _, colour in image.getcolors(1 << 20) or []}
        assert (31, 119, 180) in colours
    with pytest.raises(ValueError, match="loss: expected the losses"):
        LossGraphNode.execute({"loss": []}, "graph")
