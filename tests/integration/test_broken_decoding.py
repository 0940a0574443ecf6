"""A decoder that overflows in half precision, at the public door: said, and decoded once more."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from tests.integration.test_demo_picture import frames_of
from tests.support.prompts import DEMO_CHECKPOINT, demo_prompt
from tests.support.server_process import REPOSITORY, ServerProcess, running_server

PREFIX = "first_stage_model."
TEXT_FRAME = 3
FACTOR = 2e4  # makes the first features of the decoder too large for half precision; its norms
# divide by their size, so that the picture hardly changes


def decoder_weights(factor: float) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The demo model's autoencoder with larger first features, and its file's metadata."""
    with safe_open(str(REPOSITORY / "models/checkpoints" / DEMO_CHECKPOINT), "pt") as file:
        weights = {
            key[len(PREFIX) :]: file.get_tensor(key).float()
            for key in file.keys()  # noqa: SIM118 - no mapping
            if key.startswith(PREFIX)
        }
        metadata = dict(file.metadata())
    for name in ("weight", "bias"):
        weights[f"decoder.conv_in.{name}"] *= factor
    return weights, metadata


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that decodes in half precision, with three autoencoders beside the demo model."""
    base = tmp_path_factory.mktemp("half")
    models = base / "some-models"
    (models / "vae").mkdir(parents=True)
    (models / "checkpoints").mkdir()
    shutil.copy(REPOSITORY / "models/checkpoints" / DEMO_CHECKPOINT, models / "checkpoints")
    for name, factor in (("overflows", FACTOR), ("broken", float("nan"))):
        weights, metadata = decoder_weights(factor)
        save_file(weights, models / "vae" / f"{name}.safetensors", metadata)
    arguments = ("--cpu", "--fp16-vae", "--models-directory", str(models))
    with running_server(base, *arguments) as running:
        yield running


def decoded_by(name: str | None, node: str) -> dict[str, Any]:
    """A picture that an autoencoder decodes; None is the demo model's own."""
    prompt = demo_prompt(size=(64, 64), steps=2, prefix="half")
    prompt["6"]["class_type"] = node
    if node == "VAEDecodeTiled":
        tiles = {"tile_size": 64, "overlap": 16, "temporal_size": 64, "temporal_overlap": 8}
        prompt["6"]["inputs"] |= tiles
    if name is not None:
        file = {"vae_name": f"{name}.safetensors"}
        prompt["8"] = {"class_type": "VAELoader", "inputs": file}
        prompt["6"]["inputs"]["vae"] = ["8", 0]
    return prompt


def pixels(server: ServerProcess, prompt: dict[str, Any]) -> Any:
    picture = Image.open(io.BytesIO(server.picture(server.run(prompt), "7")))
    return np.asarray(picture, dtype=np.int16)


@pytest.mark.parametrize("node", ["VAEDecode", "VAEDecodeTiled"])
async def test_what_overflows_is_said_and_decoded_in_full_precision(
    node: str, server: ServerProcess
) -> None:
    prompt = decoded_by("overflows", node)
    frames = await frames_of(server, prompt, flags=True)
    notes = [f for f in frames if isinstance(f, bytes) and f[:4] == TEXT_FRAME.to_bytes(4, "big")]
    assert any(b"torch.float16 gave NaN; decoding in float32" in note for note in notes)
    assert any(isinstance(f, dict) and f["type"] == "execution_success" for f in frames)
    again = pixels(server, prompt)
    assert abs(again - pixels(server, decoded_by(None, node))).mean() < 8


@pytest.mark.parametrize("node", ["VAEDecode", "VAEDecodeTiled"])
def test_what_is_broken_in_any_precision_fails_with_its_cause(
    node: str, server: ServerProcess
) -> None:
    entry = server.run(decoded_by("broken", node))
    kind, error = entry["status"]["messages"][-1]
    assert kind == "execution_error"
    assert error["node_id"] == "6"
    assert "the VAE file is damaged" in error["exception_message"]


@pytest.mark.parametrize("node", ["VAEDecode", "VAEDecodeTiled"])
def test_a_latent_far_too_large_is_the_cause_and_not_the_file(
    node: str, server: ServerProcess
) -> None:
    prompt = decoded_by(None, node)
    source = prompt["6"]["inputs"]["samples"]
    for power in range(30):  # a node takes no factor above 10
        multiplied = {"samples": source, "multiplier": 10.0}
        prompt[f"x{power}"] = {"class_type": "LatentMultiply", "inputs": multiplied}
        source = [f"x{power}", 0]
    prompt["6"]["inputs"]["samples"] = source
    entry = server.run(prompt)
    kind, error = entry["status"]["messages"][-1]
    assert kind == "execution_error"
    assert "the latent is too large" in error["exception_message"]
