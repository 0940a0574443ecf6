"""Training at the public door: one prompt trains and uses a LoRA, the next loads its file."""

from __future__ import annotations

from typing import Any

from tests.support.prompts import demo_prompt
from tests.support.server_process import ServerProcess

STEPS = 2
TRAINING = {
    "batch_size": 1, "grad_accumulation_steps": 1, "steps": STEPS, "learning_rate": 0.01, "rank": 2,
    "optimizer": "AdamW", "loss_function": "MSE", "seed": 1, "training_dtype": "fp32",
    "lora_dtype": "fp32", "algorithm": "LoRA", "gradient_checkpointing": False,
    "existing_lora": "[None]", "bucket_mode": False,
}  # fmt: skip


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def picture_with(lora: dict[str, Any] | None) -> dict[str, Any]:
    """A small picture by the demo model, changed by a node that takes the model, if given."""
    prompt = demo_prompt(size=(64, 64), steps=2, prefix="trained")
    if lora is not None:
        lora["inputs"]["model"] = ["1", 0]
        prompt |= {"20": lora}
        prompt["5"]["inputs"]["model"] = ["20", 0]
    return prompt


def training_prompt() -> dict[str, Any]:
    """Trains on one grey picture; 32 saves the LoRA, 33 plots the losses, 34 prints them."""
    use = node("LoraModelLoader", lora=["31", 1], strength_model=1.0)
    return {
        **picture_with(use),
        "30": node("EmptyImage", width=64, height=64, batch_size=1, color=0x808080),
        "35": node("VAEEncode", pixels=["30", 0], vae=["1", 2]),
        "31": node(
            "TrainLoraNode", model=["1", 0], latents=["35", 0], positive=["2", 0], **TRAINING
        ),
        "32": node("SaveLoRA", lora=["31", 1], prefix="loras/door", steps=["31", 3]),
        "33": node("LossGraphNode", loss=["31", 2], filename_prefix="door"),
        "34": node("PreviewAny", source=["31", 2]),
    }


def test_a_trained_lora_is_used_saved_and_loaded(server: ServerProcess) -> None:
    trained = server.run(training_prompt())
    assert trained["status"]["status_str"] == "success", trained["status"]
    assert trained["outputs"]["34"]["text"][0].count(".") == STEPS  # one loss a step
    assert server.picture(trained, "33").startswith(b"\x89PNG")
    loaders = server.get("/object_info/LoraLoaderModelOnly")["LoraLoaderModelOnly"]
    (name,) = (
        file for file in loaders["input"]["required"]["lora_name"][0] if file.startswith("door")
    )
    assert name == f"door_{STEPS}_steps_00001_.safetensors"
    from_file = node("LoraLoaderModelOnly", lora_name=name, strength_model=1.0)
    loaded, plain = server.run(picture_with(from_file)), server.run(picture_with(None))
    pixels = [server.picture(entry, "7") for entry in (trained, loaded, plain)]
    assert without_texts(pixels[0]) == without_texts(pixels[1]) != without_texts(pixels[2])


def without_texts(png: bytes) -> bytes:
    """The compressed pixels of a PNG, which also holds the prompt."""
    return png[png.index(b"IDAT") :]
