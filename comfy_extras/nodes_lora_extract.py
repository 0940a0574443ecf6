"""Saves what makes one model differ from another as a LoRA."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import folder_paths
from comfy import progress
from comfy.devices import placement, residency
from comfy.patching.attributes import owner_of
from comfy.weights.state_dict import save_torch_file
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_extras.nodes_model_merging import next_file

logger = logging.getLogger(__name__)

LORA, WHOLE = "standard", "full_diff"


def extract_lora(difference: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Two factors whose product is the nearest one of a rank to a weight difference.

    Source: Eckart and Young 1936: the singular value decomposition, cut off.

    Args:
        difference: [out, in] or a convolution's [out, in, h, w].
        rank: Greatest rank; never more than the weight has.

    Returns:
        Up [out, rank] and down [rank, in], both with the kernel axes of a convolution.
    """
    kernel = tuple(difference.shape[2:])
    flat = difference.float().flatten(1)
    rank = min(rank, *flat.shape)
    u, s, vh = torch.linalg.svd(flat, full_matrices=False)
    root = s[:rank].sqrt()  # half to each factor, so that both stay in the range of float16
    up, down = u[:, :rank] * root, root[:, None] * vh[:rank]
    if kernel:
        up = up.reshape(*up.shape, *[1] * len(kernel))
        down = down.reshape(rank, difference.shape[1], *kernel)
    return up, down


def _in_numbers(patcher: Any, key: str, shown: Tensor, parts: list[Any]) -> Tensor:
    """A weight with its patches; one in a code is computed anew, since that rounds differences.

    Args:
        shown: As the loaded model has it.
        parts: Its entry of `get_key_patches`.
    """
    (weight, convert), *patches = parts
    if not hasattr(owner_of(patcher.model, key)[0], f"convert_{key.rpartition('.')[2]}"):
        return shown
    return patcher.calculate_weight(patches, convert(weight.detach()).float(), key)


def lora_tensors(
    patcher: Any, prefixes: tuple[str, str], rank: int, lora_type: str, bias_diff: bool
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the LoRA by key, for one network.

    Args:
        patcher: A model that is the difference of two, such as ModelSubtract makes.
        prefixes: Of the network's keys, and of the keys in the file.
    """
    inside, written = prefixes
    residency.load_models_gpu([patcher], force_patch_weights=True)
    whole = patcher.get_key_patches(inside)
    for key, shown in patcher.model_state_dict(filter_prefix=inside).items():
        if key not in whole:  # scales and settings of a code
            continue
        value = _in_numbers(patcher, key, shown, whole[key])
        name = written + key[len(inside) :]
        if key.endswith(".weight"):
            name = name.removesuffix(".weight")
            is_vector = value.ndim < 2
            if lora_type == WHOLE or (is_vector and bias_diff):
                yield f"{name}.diff", value
            elif not is_vector:
                try:
                    up, down = extract_lora(value.to(placement.get_torch_device()), rank)
                except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # no convergence
                    progress.warn(logger, "no factors were found for %s; it is left out", key)
                    continue
                yield f"{name}.lora_up.weight", up
                yield f"{name}.lora_down.weight", down
        elif bias_diff and key.endswith(".bias"):
            yield f"{name.removesuffix('.bias')}.diff_b", value


class LoraSave(io.ComfyNode):
    """Saves the difference of two models as a LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoraSave",
            display_name="Extract and Save Lora",
            category="_for_testing",
            is_experimental=True,
            is_output_node=True,
            inputs=[
                io.String.Input("filename_prefix", default="loras/ComfyUI_extracted_lora"),
                io.Int.Input("rank", default=8, min=1, max=4096, step=1),
                io.Combo.Input("lora_type", options=[LORA, WHOLE]),
                io.Boolean.Input("bias_diff", default=True),
                io.Model.Input("model_diff", optional=True, tooltip="From ModelSubtract."),
                io.Clip.Input("text_encoder_diff", optional=True, tooltip="From CLIPSubtract."),
            ],
            outputs=[],
        )

    @classmethod
    def execute(
        cls,
        filename_prefix: str,
        rank: int,
        lora_type: str,
        bias_diff: bool,
        model_diff: Any = None,
        text_encoder_diff: Any = None,
    ) -> io.NodeOutput:
        if model_diff is None and text_encoder_diff is None:
            return io.NodeOutput()
        how = (rank, lora_type, bias_diff)
        tensors: dict[str, Tensor] = {}
        if model_diff is not None:
            prefixes = ("diffusion_model.", "diffusion_model.")
            tensors.update(lora_tensors(model_diff, prefixes, *how))
        if text_encoder_diff is not None:
            patcher = text_encoder_diff.patcher
            tensors.update(lora_tensors(patcher, ("", "text_encoders."), *how))
        path, _ = next_file(filename_prefix, folder_paths.get_output_directory())
        halves = {
            key: value.to("cpu", torch.float16).contiguous() for key, value in tensors.items()
        }
        save_torch_file(halves, path)
        return io.NodeOutput()

    save = execute


comfy_entrypoint = entrypoint_of(LoraSave)
