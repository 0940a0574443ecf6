"""Graphs that tests submit."""

from __future__ import annotations

from typing import Any

DEMO_CHECKPOINT = "latentloom-demo.safetensors"


def demo_prompt(
    text: str = "a red circle on a blue background",
    negative: str = "",
    *,
    checkpoint: str = DEMO_CHECKPOINT,
    size: tuple[int, int] = (128, 128),
    prefix: str = "test",
    **sampler: Any,
) -> dict[str, Any]:
    """Text to picture with the demo model; node "7" saves, `sampler` replaces KSampler inputs."""
    inputs = {"seed": 42, "steps": 20, "cfg": 7.0, "sampler_name": "euler", "scheduler": "normal"}
    inputs |= {"denoise": 1.0, **sampler}
    return {
        "1": _node("CheckpointLoaderSimple", ckpt_name=checkpoint),
        "2": _node("CLIPTextEncode", text=text, clip=["1", 1]),
        "3": _node("CLIPTextEncode", text=negative, clip=["1", 1]),
        "4": _node("EmptyLatentImage", width=size[0], height=size[1], batch_size=1),
        "5": _node(
            "KSampler",
            **inputs,
            model=["1", 0],
            positive=["2", 0],
            negative=["3", 0],
            latent_image=["4", 0],
        ),
        "6": _node("VAEDecode", samples=["5", 0], vae=["1", 2]),
        "7": _node("SaveImage", images=["6", 0], filename_prefix=prefix),
    }


def plain_prompt(width: int = 64, prefix: str = "plain") -> dict[str, Any]:
    """Two nodes that need no model; node "2" saves."""
    return {
        "1": _node("EmptyImage", width=width, height=32, batch_size=1, color=255),
        "2": _node("SaveImage", images=["1", 0], filename_prefix=prefix),
    }


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}
