"""Nodes that keep conditionings in files, so that a prompt can do without its text encoder.

A file holds the tensor "conditioning" and its options: tensors by name, lists of tensors as
`name.0`, `name.1`..., and what is a number, a switch or a text as JSON in the header.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import folder_paths
from comfy.weights.state_dict import load_torch_file, save_torch_file
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

MAIN, HEADER, FOLDER = "conditioning", "conditioning_options", "embeddings"
PLAIN = (bool, int, float, str)  # what goes into the header
NUMBERED = re.compile(r"(.+)\.(\d{1,9})", re.ASCII)


def parted(options: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Options that go into a file as tensors, and those that go into its header.

    Raises:
        ValueError: One is neither, or has the name of the tensor that is guided by.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, value in options.items():
        if name == MAIN:
            raise ValueError(f"conditioning: its option {name!r} would take the place of the text")
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, list | tuple) and all(isinstance(part, Tensor) for part in value):
            tensors |= {f"{name}.{number}": part for number, part in enumerate(value)}
        elif isinstance(value, PLAIN):
            plain[name] = value
        elif value is not None:
            raise ValueError(
                f"conditioning: its option {name!r} cannot be saved: expected tensors, numbers, "
                f"switches or texts, found {type(value).__name__}; save the conditioning before "
                "the node that sets it"
            )
    return tensors, plain


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Options of the tensors of a file."""
    made: dict[str, Any] = {}
    lists: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        numbered = NUMBERED.fullmatch(name)
        if numbered:
            lists.setdefault(numbered[1], {})[int(numbered[2])] = tensor
        else:
            made[name] = tensor
    return made | {name: [parts[n] for n in sorted(parts)] for name, parts in lists.items()}


class SaveConditioning(io.ComfyNode):
    """Writes a conditioning to the output folder, and hands it on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveConditioning",
            display_name="Save Conditioning",
            category="advanced/conditioning",
            description="Saves a conditioning to the output folder; in models/embeddings, Load "
            "Conditioning finds it.",
            is_output_node=True,
            inputs=[
                io.Conditioning.Input("conditioning"),
                io.String.Input("filename_prefix", default="conditioning/ComfyUI"),
            ],
            outputs=[io.Conditioning.Output(display_name="conditioning")],
        )

    @classmethod
    def execute(cls, conditioning: Any, filename_prefix: str) -> io.NodeOutput:
        if len(conditioning) != 1:
            raise ValueError(
                f"conditioning: expected one entry, found {len(conditioning)}; save each before "
                "they are joined"
            )
        main, options = conditioning[0]
        tensors, plain = parted(options)
        folder, name, counter, _, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory()
        )
        header = {HEADER: json.dumps(plain)} if plain else None
        path = os.path.join(folder, f"{name}_{counter:05}_.safetensors")
        # Parts of one tensor would be written as the whole.
        whole = {key: part.detach().contiguous() for key, part in {MAIN: main, **tensors}.items()}
        save_torch_file(whole, path, header)
        return io.NodeOutput(conditioning)


class ConditioningLoader(io.ComfyNode):
    """Reads a conditioning from a file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        files = folder_paths.get_filename_list(FOLDER)
        return io.Schema(
            node_id="ConditioningLoader",
            display_name="Load Conditioning",
            category="advanced/conditioning",
            description="Reads a conditioning that Save Conditioning wrote, from the folder of "
            "embeddings.",
            inputs=[io.Combo.Input("conditioning_name", options=files)],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning_name: str) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise(FOLDER, conditioning_name)
        tensors, header = load_torch_file(path, device=torch.device("cpu"), return_metadata=True)
        main = tensors.pop(MAIN, None)
        if not _is_text(main):
            found = f"keys {sorted(tensors)[:5]}"
            if isinstance(main, Tensor):
                found = f"{tuple(main.shape)} of {main.dtype}"
            raise ValueError(
                f"conditioning_name: {conditioning_name}: expected a tensor {MAIN!r} "
                "[batch, tokens, width] of floating point, found "
                f"{found}; such files come from Save Conditioning"
            )
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"conditioning_name: {conditioning_name}: expected tensors by name, found "
                    f"{type(value).__name__} as {name!r:.100}; such files come from Save "
                    "Conditioning"
                )
        options = joined(tensors) | _plain(header, conditioning_name)
        return io.NodeOutput([[main.detach(), options]])


def _is_text(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and value.ndim == 3 and value.numel() > 0
    return is_tensor and value.is_floating_point()


def _plain(header: Mapping[str, str] | None, file: str) -> dict[str, Any]:
    """Options in the header of a file."""
    text = (header or {}).get(HEADER, "{}")
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict) or not all(isinstance(v, PLAIN) for v in options.values()):
        raise ValueError(
            f"conditioning_name: {file}: expected a JSON object of numbers, switches and "
            f"texts in the header's {HEADER!r}, found {text!r:.100}"
        )
    return options


comfy_entrypoint = entrypoint_of(SaveConditioning, ConditioningLoader)
