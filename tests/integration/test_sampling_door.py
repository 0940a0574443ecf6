"""Sampling at the public door: what is refused and why, what is said on the node, what a saved
picture tells about its making, and equal pictures after a restart."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.integration.test_demo_picture import frames_of
from tests.support.processor import has_equal_products
from tests.support.prompts import demo_prompt
from tests.support.server_process import ServerProcess, running_server

LARGEST_SEED = 2**64 - 1
TEXT_FRAME = 3
SMALL = (64, 64)


def small_prompt(**changes: Any) -> dict[str, Any]:
    return demo_prompt(size=SMALL, **{"steps": 2, "prefix": "door", **changes})


def custom(prompt: dict[str, Any], sigmas: str, sampler: str = "euler") -> dict[str, Any]:
    """The prompt with levels written by hand in place of KSampler's."""
    prompt["8"] = {"class_type": "ManualSigmas", "inputs": {"sigmas": sigmas}}
    prompt["9"] = {"class_type": "KSamplerSelect", "inputs": {"sampler_name": sampler}}
    prompt["5"] = {
        "class_type": "SamplerCustom",
        "inputs": {
            "add_noise": True, "noise_seed": 1, "cfg": 3.0, "sampler": ["9", 0], "sigmas": ["8", 0],
            "model": ["1", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0],
        },
    }  # fmt: skip
    return prompt


def of_another_model(prompt: dict[str, Any]) -> dict[str, Any]:
    """The prompt with a latent of sixteen channels that is not empty."""
    prompt["4"]["class_type"] = "EmptySD3LatentImage"
    prompt["8"] = {"class_type": "ManualSigmas", "inputs": {"sigmas": "1"}}
    prompt["9"] = {"class_type": "RandomNoise", "inputs": {"noise_seed": 1}}
    inputs = {"model": ["1", 0], "noise": ["9", 0], "sigmas": ["8", 0], "latent_image": ["4", 0]}
    prompt["10"] = {"class_type": "AddNoise", "inputs": inputs}
    prompt["5"]["inputs"]["latent_image"] = ["10", 0]
    return prompt


REFUSED = {
    "levels that rise": (custom(small_prompt(), "3, 1, 2, 0"), "rise from 1 to 2 at step 2"),
    "levels that rise, with noise": (
        custom(small_prompt(), "1, 5", "euler_ancestral"),
        "rise from 1 to 5 at step 1",
    ),
    "levels after a clean one": (custom(small_prompt(), "0, 5"), "sigma 0 is 0 and sigma 1 is 5"),
    "levels below zero": (custom(small_prompt(), "1, -3"), "sigma 1 is -3"),
    "a latent of another model": (of_another_model(small_prompt()), "16 channels .* works on 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_cannot_work_is_refused_with_its_numbers(
    case: str, server: ServerProcess
) -> None:
    import re

    prompt, reason = REFUSED[case]
    entry = server.run(prompt)
    kind, error = entry["status"]["messages"][-1]
    assert kind == "execution_error"
    assert error["node_id"] == "5"
    assert re.search(reason, error["exception_message"]), error["exception_message"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": LARGEST_SEED + 1}, "value_bigger_than_max"),
        ({"seed": -1}, "value_smaller_than_min"),
        ({"sampler_name": "eulr"}, "value_not_in_list"),
        ({"scheduler": "karas"}, "value_not_in_list"),
    ],
)
def test_values_outside_of_their_limits_are_refused_before_queueing(
    changes: dict[str, Any], reason: str, server: ServerProcess
) -> None:
    status, answer = server.post("/prompt", {"prompt": small_prompt(**changes)})
    assert status == 400
    (error,) = answer["node_errors"]["5"]["errors"]
    assert error["type"] == reason


def test_the_largest_seed_is_exact(server: ServerProcess) -> None:
    pictures = [
        server.picture(server.run(small_prompt(seed=seed)), "7")
        for seed in (LARGEST_SEED, LARGEST_SEED - 1)
    ]
    assert pictures[0] != pictures[1]


async def test_a_missing_embedding_is_said_on_the_node(server: ServerProcess) -> None:
    prompt = small_prompt()
    prompt["2"]["inputs"]["text"] = "a cat, embedding:nowhere, on a mat"
    frames = await frames_of(server, prompt, flags=True)
    notes = [f for f in frames if isinstance(f, bytes) and f[:4] == TEXT_FRAME.to_bytes(4, "big")]
    assert len(notes) == 1
    assert b"Embedding 'nowhere' was not found" in notes[0]


async def test_a_broken_latent_is_said_on_the_node_and_fails_with_its_cause(
    server: ServerProcess,
) -> None:
    prompt = custom(small_prompt(), "3e38, 1e38")
    prompt["8"]["inputs"]["sigmas"] = "3" + "0" * 38 + ", 1, 0"
    frames = await frames_of(server, prompt, flags=True)
    notes = [f for f in frames if isinstance(f, bytes) and f[:4] == TEXT_FRAME.to_bytes(4, "big")]
    assert any(b"NaN or infinite" in note for note in notes)
    errors = [f["data"] for f in frames if isinstance(f, dict) and f["type"] == "execution_error"]
    assert errors[0]["node_id"] == "6"
    assert "NaN" in errors[0]["exception_message"]


def test_a_saved_picture_tells_what_it_was_made_on(server: ServerProcess) -> None:
    entry = server.run(small_prompt(seed=3))
    picture: Any = Image.open(io.BytesIO(server.picture(entry, "7")))
    made_on = json.loads(picture.text["environment"])
    assert made_on["torch"] == torch.__version__
    assert made_on.keys() == {
        "latentloom", "torch", "python", "device", "threads", "attention", "deterministic",
        "precision",
    }  # fmt: skip
    assert made_on["threads"] >= 1
    assert entry["environment"] == made_on
    assert server.get(f"/api/jobs/{entry['prompt'][1]}")["environment"] == made_on


def bits_of(server: ServerProcess, prompt: dict[str, Any]) -> list[bytes]:
    """Pixels of every picture the prompt saves."""
    saved = server.run(prompt)["outputs"]["7"]["images"]
    files = [
        server.get_bytes(f"/view?filename={one['filename']}&subfolder={one['subfolder']}")
        for one in saved
    ]
    return [Image.open(io.BytesIO(file)).tobytes() for file in files]


def read_as(text: str, **interpretation: str) -> dict[str, Any]:
    prompt = small_prompt(text=text, seed=6)
    prompt["2"]["inputs"] |= {f"weight_{name}": value for name, value in interpretation.items()}
    return prompt


def test_what_weights_in_a_text_do_can_be_chosen_for_each_text(server: ServerProcess) -> None:
    weighted, text = "a (red:1.7) circle", "a red circle"
    usual = bits_of(server, read_as(weighted))
    by_name = [
        bits_of(server, read_as(weighted, interpretation=name))
        for name in ("from clip", "default", "A1111", "down-weight", "none")
    ]
    assert by_name[:2] == [usual, usual]
    assert by_name[4] == bits_of(server, read_as(text))
    assert len({picture for (picture,) in by_name}) == 4
    status, answer = server.post("/prompt", {"prompt": read_as(text, interpretation="louder")})
    assert status == 400
    assert answer["node_errors"]["2"]["errors"][0]["type"] == "value_not_in_list"


def of_batch(*picked: int, sampler_name: str = "euler") -> dict[str, Any]:
    """The prompt for a batch of three, or for the first and the number of pictures of it."""
    prompt = small_prompt(seed=4, sampler_name=sampler_name)
    prompt["4"]["inputs"]["batch_size"] = 3
    if picked:
        inputs = {"samples": ["4", 0], "batch_index": picked[0], "length": picked[1]}
        prompt["8"] = {"class_type": "LatentFromBatch", "inputs": inputs}
        prompt["5"]["inputs"]["latent_image"] = ["8", 0]
    return prompt


def test_a_restart_changes_no_bit(server: ServerProcess, tmp_path: Path) -> None:
    prompts = [small_prompt(seed=4, sampler_name=name) for name in ("euler_ancestral", "dpmpp_sde")]
    prompts += [of_batch(sampler_name="dpmpp_2m_sde")]
    with running_server(tmp_path, "--cpu") as other:
        for prompt in prompts:
            assert bits_of(other, prompt) == bits_of(server, prompt)


@pytest.mark.skipif(not has_equal_products(), reason="here a batch rounds by its size")
def test_neither_the_batch_nor_a_call_for_each_text_changes_a_bit(
    server: ServerProcess, tmp_path: Path
) -> None:
    prompts = [of_batch(), of_batch(1, 2), of_batch(2, 1)]
    made = [bits_of(server, prompt) for prompt in prompts]
    assert len(set(made[0])) == 3
    assert made[1] == made[0][1:]
    assert made[2] == made[0][2:]
    with running_server(tmp_path, "--cpu", "--deterministic") as other:
        assert [bits_of(other, prompt) for prompt in prompts[:2]] == made[:2]
        saved: Any = Image.open(io.BytesIO(other.picture(other.run(prompts[1]), "7")))
    made_on = json.loads(saved.text["environment"])
    assert made_on["deterministic"] is True
    assert made_on["device"] == "cpu"
