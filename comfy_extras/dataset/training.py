"""Nodes that make, group, save and load latents and conditionings for training."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

import folder_paths
from comfy_api.latest import io
from comfy_extras.dataset.files import output_folder
from comfy_extras.dataset.schema import only

Latent = dict[str, Any]
Conditioning = list[list[Any]]
FACTS = "metadata.json"


def training_outputs() -> list[io.Output]:
    """A list of latents and one of conditionings."""
    return [
        io.Latent.Output(display_name="latents", is_output_list=True),
        io.Conditioning.Output(display_name="conditioning", is_output_list=True),
    ]


def texts_for(texts: list[str] | None, count: int) -> list[str]:
    """One text for each picture; a single one serves all.

    Raises:
        ValueError: There are others than one or `count` texts.
    """
    given = list(texts or [""])
    if len(given) == 1:
        return given * count
    if len(given) != count:
        raise ValueError(
            f"texts: expected one, or as many as there are pictures ({count}), found {len(given)}"
        )
    return given


class MakeTrainingDataset(io.ComfyNode):
    """Encodes pictures and texts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MakeTrainingDataset",
            display_name="Make Training Dataset",
            category="dataset",
            is_experimental=True,
            is_input_list=True,
            inputs=[
                io.Image.Input("images"),
                io.Vae.Input("vae"),
                io.Clip.Input("clip"),
                io.String.Input("texts", optional=True),
            ],
            outputs=training_outputs(),
        )

    @classmethod
    def execute(
        cls, images: list[Tensor], vae: list[Any], clip: list[Any], texts: list[str] | None = None
    ) -> io.NodeOutput:
        latents = [{"samples": only(vae).encode(image[..., :3])} for image in images]
        encoder = only(clip)
        known: dict[str, Conditioning] = {}
        conditioning = []
        for text in texts_for(texts, len(images)):
            if text not in known:
                known[text] = encoder.encode_from_tokens_scheduled(encoder.tokenize(text))
            conditioning.append(known[text])
        return io.NodeOutput(latents, conditioning)


class ResolutionBucket(io.ComfyNode):
    """Groups latents of one size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResolutionBucket",
            display_name="Resolution Bucket",
            category="dataset",
            is_experimental=True,
            is_input_list=True,
            inputs=[io.Latent.Input("latents"), io.Conditioning.Input("conditioning")],
            outputs=training_outputs(),
        )

    @classmethod
    def execute(cls, latents: list[Latent], conditioning: list[Conditioning]) -> io.NodeOutput:
        samples = [one for latent in latents for one in latent["samples"].split(1)]
        entries = [entry for single in conditioning for entry in single]
        if len(samples) != len(entries):
            raise ValueError(
                f"conditioning: expected as many as there are latents ({len(samples)}), found "
                f"{len(entries)}"
            )
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, sample in enumerate(samples):
            groups.setdefault(tuple(sample.shape[1:]), []).append(number)
        return io.NodeOutput(
            [{"samples": torch.cat([samples[n] for n in group])} for group in groups.values()],
            [[entries[n] for n in group] for group in groups.values()],
        )


class SaveTrainingDataset(io.ComfyNode):
    """Writes latents and conditionings in files of limited size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveTrainingDataset",
            display_name="Save Training Dataset",
            category="dataset",
            is_experimental=True,
            is_output_node=True,
            is_input_list=True,
            inputs=[
                io.Latent.Input("latents"),
                io.Conditioning.Input("conditioning"),
                io.String.Input("folder_name", default="training_dataset"),
                io.Int.Input("shard_size", default=1000, min=1, max=100000),
            ],
            outputs=[],
        )

    @classmethod
    def execute(
        cls,
        latents: list[Latent],
        conditioning: list[Conditioning],
        folder_name: list[str],
        shard_size: list[int],
    ) -> io.NodeOutput:
        if len(latents) != len(conditioning):
            raise ValueError(
                f"{len(latents)} latents and {len(conditioning)} conditionings; expected one each"
            )
        folder, size = output_folder(only(folder_name)), only(shard_size)
        starts = range(0, len(latents), size)
        for number, start in enumerate(starts):
            part = slice(start, start + size)
            content = {"latents": latents[part], "conditioning": conditioning[part]}
            torch.save(content, os.path.join(folder, shard_name(number)))
        facts = {
            "num_samples": len(latents),
            "num_shards": len(starts),
            "shard_size": size,
        }
        with open(os.path.join(folder, FACTS), "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=2)
        return io.NodeOutput()


def shard_name(number: int) -> str:
    """File name of a part."""
    return f"shard_{number:04d}.pkl"


class LoadTrainingDataset(io.ComfyNode):
    """Reads latents and conditionings that were saved."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadTrainingDataset",
            display_name="Load Training Dataset",
            category="dataset",
            is_experimental=True,
            inputs=[io.String.Input("folder_name", default="training_dataset")],
            outputs=training_outputs(),
        )

    @classmethod
    def execute(cls, folder_name: str) -> io.NodeOutput:
        folder = folder_paths.confine(folder_paths.get_output_directory(), folder_name)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        shards = [name for name in names if name.startswith("shard_") and name.endswith(".pkl")]
        if not shards:
            raise FileNotFoundError(
                f"there is no training set in the output folder's {folder_name!r}; save one with "
                "Save Training Dataset"
            )
        latents: list[Latent] = []
        conditioning: list[Conditioning] = []
        for name in shards:
            # Pickled, but read by a reader that makes tensors and containers only.
            content = torch.load(os.path.join(folder, name), "cpu", weights_only=True)
            latents.extend(content["latents"])
            conditioning.extend(content["conditioning"])
        return io.NodeOutput(latents, conditioning)


NODES: tuple[type[io.ComfyNode], ...] = (
    MakeTrainingDataset,
    ResolutionBucket,
    SaveTrainingDataset,
    LoadTrainingDataset,
)
