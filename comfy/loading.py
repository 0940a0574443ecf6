"""From files to things that run: diffusion model, text encoder, autoencoder.

The one module that joins families, text encoders, autoencoders, weights and patching. A checkpoint
is one file with up to three parts; each is recognised by its keys, built without weights and then
filled from the memory-mapped file, so that no weight exists twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comfy import clip_vision, progress
from comfy.devices import placement, precision
from comfy.families import detection, unsupported
from comfy.families.family import ModelFamily, strip_prefixes
from comfy.families.text_sizes import text_model_configs, token_lengths
from comfy.lora_loading import load_lora_for_models  # noqa: F401 - all loading under one name
from comfy.patching.dynamic import core_patcher_class
from comfy.patching.patcher import ModelPatcher
from comfy.text_encoders.clip import CLIP
from comfy.text_encoders.vocabularies import EMBEDDED_NAMES, vocabulary_beside
from comfy.vae.vae import VAE
from comfy.weights import contents, state_dict
from comfy.weights.encodings import code_names, gather
from comfy.weights.errors import WeightFileError
from comfy.weights.fill import UnknownWeightsError
from comfy.weights.header_hints import read_hints
from comfy.weights.layout import arrange_convolutions
from comfy.weights.ltx_header import told_of
from comfy.weights.marks import cannot_run

logger = logging.getLogger(__name__)

StateDict = dict[str, Tensor]
Options = dict[str, Any]
Metadata = Mapping[str, str]

# Option of text encoders: folders in which a vocabulary file is looked for.
FOLDERS_OPTION = "tokenizer_folders"

# What to do where a checkpoint's own autoencoder is of no known kind.
OWN_AUTOENCODER = "load an autoencoder from a file of its own, with a Load VAE node"


class UnknownArchitectureError(WeightFileError):
    """The file was read, but its keys belong to no model family that can be loaded."""


class BrokenCheckpointError(WeightFileError):
    """The file belongs to a known family, but parts of it are missing or contradictory."""

    mend_text = (
        "download it again from its source; if its header gives head or group counts, check them"
    )


class Checkpoint(NamedTuple):
    """The parts of a checkpoint; None for one that was not asked for or is not in the file."""

    model: ModelPatcher | None
    clip: CLIP | None
    vae: VAE | None
    clip_vision: Any | None


class Parts(NamedTuple):
    """Which parts of a checkpoint are wanted."""

    model: bool = True
    clip: bool = True
    vae: bool = True
    clip_vision: bool = False


# -- whole checkpoints ---------------------------------------------------------------------------


def load_checkpoint_guess_config(
    ckpt_path: str,
    output_vae: bool = True,
    output_clip: bool = True,
    output_clipvision: bool = False,
    embedding_directory: Any = None,
    output_model: bool = True,
    model_options: Options | None = None,
    te_model_options: Options | None = None,
) -> Checkpoint:
    """Loads a checkpoint file, whatever family it belongs to.

    Args:
        ckpt_path: The file.
        output_vae, output_clip, output_clipvision, output_model: Parts that are wanted.
        embedding_directory: Folder or folders of textual inversions.
        model_options: `dtype`, `custom_operations`, `load_device`, `offload_device` and the like;
            `vae_device` is where the autoencoder runs.
        te_model_options: Likewise for the text encoder.

    Raises:
        WeightFileError: The file cannot be read, is of no known family, or is damaged.
    """
    tensors, metadata = state_dict.load_torch_file(ckpt_path, return_metadata=True)
    found = contents_in_words(tensors)
    options = dict(te_model_options or {})
    options[FOLDERS_OPTION] = [os.path.dirname(ckpt_path), *options.get(FOLDERS_OPTION, ())]
    with naming(ckpt_path):
        checkpoint = load_state_dict_guess_config(
            tensors,
            output_vae,
            output_clip,
            output_clipvision,
            embedding_directory,
            output_model,
            model_options,
            options,
            metadata,
        )
    if checkpoint is None:
        raise unknown_architecture(ckpt_path, found)
    return checkpoint


def load_state_dict_guess_config(
    sd: StateDict,
    output_vae: bool = True,
    output_clip: bool = True,
    output_clipvision: bool = False,
    embedding_directory: Any = None,
    output_model: bool = True,
    model_options: Options | None = None,
    te_model_options: Options | None = None,
    metadata: Metadata | None = None,
) -> Checkpoint | None:
    """As `load_checkpoint_guess_config`, from tensors; None for an unknown family.

    Args:
        sd: Tensors by key. Emptied of what is used.
        metadata: The file's header.

    Raises:
        IncompleteWeightsError: The family is known, but weights are missing or contradictory.
    """
    gather(sd)
    prefix = detection.unet_prefix_from_state_dict(sd)
    family = detection.model_config_from_unet(sd, prefix, metadata=metadata)
    if family is None:
        return None
    wanted = Parts(output_model, output_clip, output_vae, output_clipvision)
    clip = vae = patcher = vision = None
    if wanted.clip_vision:
        vision = _checkpoint_clip_vision(family, sd)
    if wanted.clip:
        clip = _checkpoint_clip(family, sd, embedding_directory, te_model_options, metadata)
    if wanted.vae:
        vae = _checkpoint_vae(family, sd, metadata, (model_options or {}).get("vae_device"))
    if wanted.model:
        patcher = _patcher(family, sd, prefix, model_options or {})
    return Checkpoint(patcher, clip, vae, vision)


def _checkpoint_clip(
    family: ModelFamily,
    sd: StateDict,
    embedding_directory: Any,
    options: Options | None,
    metadata: Metadata | None,
) -> CLIP | None:
    target = family.clip_target(sd)
    if target is None:
        return None
    weights = family.process_clip_state_dict(sd)
    if not weights:
        progress.warn(
            logger, "the checkpoint holds no text encoder; load one with a Load CLIP node"
        )
        return None
    told = told_of(metadata, "transformer")
    sizes = text_model_configs(weights, read_hints(metadata, "text_config"), told)
    settings = dict(options or {})
    folders = settings.pop(FOLDERS_OPTION, ())
    network = {key: value for key, value in weights.items() if not key.endswith(EMBEDDED_NAMES)}
    return CLIP(
        target,
        embedding_directory=embedding_directory,
        tokenizer_data={**vocabulary_beside(weights, folders), **token_lengths(sizes), **weights},
        parameters=state_dict.calculate_parameters(network),
        state_dict=network,
        model_options={**sizes, **settings},
    )


def _checkpoint_clip_vision(family: ModelFamily, sd: StateDict) -> Any:
    prefix = family.clip_vision_prefix
    if prefix is None or not any(key.startswith(prefix) for key in sd):
        progress.warn(logger, "the %s checkpoint holds no image encoder", family.title())
        return None
    # Published files have the layout of OpenCLIP, files saved here that of CLIP.
    is_openclip = f"{prefix}transformer.resblocks.0.attn.in_proj_weight" in sd
    return clip_vision.load_clipvision_from_sd(sd, prefix, convert_keys=is_openclip)


def _checkpoint_vae(
    family: ModelFamily, sd: StateDict, metadata: Metadata | None, device: torch.device | None
) -> VAE | None:
    weights = family.process_vae_state_dict(strip_prefixes(sd, family.vae_key_prefix))
    if not weights:
        progress.warn(logger, "the checkpoint holds no autoencoder; load one with a Load VAE node")
        return None
    return VAE(sd=weights, metadata=metadata, device=device)


# -- diffusion models alone ----------------------------------------------------------------------


def load_diffusion_model(unet_path: str, model_options: Options | None = None) -> ModelPatcher:
    """Loads a diffusion model from a file of its own.

    Raises:
        WeightFileError: The file cannot be read, is of no known family, or is damaged.
    """
    tensors, metadata = state_dict.load_torch_file(unet_path, return_metadata=True)
    found = contents_in_words(tensors)
    with naming(unet_path):
        patcher = load_diffusion_model_state_dict(tensors, model_options, metadata)
    if patcher is None:
        raise unknown_architecture(unet_path, found)
    return patcher


def load_diffusion_model_state_dict(
    sd: StateDict, model_options: Options | None = None, metadata: Metadata | None = None
) -> ModelPatcher | None:
    """As `load_diffusion_model`, from tensors; None for an unknown family.

    Args:
        sd: Tensors by key, with or without a checkpoint's prefix, or under the names of the
            diffusers library. Emptied of what is used.
    """
    gather(sd)
    prefix = detection.unet_prefix_from_state_dict(sd)
    if not any(key.startswith(prefix) for key in sd):
        prefix = ""
    family = detection.model_config_from_unet(sd, prefix, metadata=metadata)
    if family is None:
        converted = detection.from_diffusers(sd, metadata)
        if converted is None:
            return None
        family, sd = converted
        prefix = ""
    return _patcher(family, sd, prefix, model_options or {})


def _patcher(
    family: ModelFamily, sd: StateDict, prefix: str, options: Mapping[str, Any]
) -> ModelPatcher:
    """Builds a family's model without weights, fills it, and puts a patcher around it."""
    load_device = options.get("load_device", placement.get_torch_device())
    offload_device = options.get("offload_device", placement.unet_offload_device())
    supported = family.supported_inference_dtypes
    dtype = options.get("dtype") or precision.unet_dtype(
        device=load_device,
        model_params=state_dict.calculate_parameters(sd, prefix),
        supported_dtypes=supported,
        weight_dtype=state_dict.weight_dtype(sd, prefix),
    )
    family.set_inference_dtype(dtype, precision.unet_manual_cast(dtype, load_device, supported))
    family.custom_operations = options.get("custom_operations", family.custom_operations)
    family.optimizations["fp8"] = bool(options.get("fp8_optimizations", False))
    codes = code_names(sd, prefix)
    model = family.get_model(sd, prefix, device="meta")
    arrange_convolutions(model.diffusion_model, load_device)
    model.load_model_weights(sd, prefix)
    model.device = offload_device
    types = [*codes, str(dtype).removeprefix("torch.")]
    logger.info("%s: weights in %s", family.title(), ", ".join(types))
    return core_patcher_class()(model, load_device, offload_device)


# -- messages ------------------------------------------------------------------------------------


@contextmanager
def naming(path: str, unknown: str = OWN_AUTOENCODER) -> Iterator[None]:
    """Puts the file's name on errors about its contents.

    Args:
        unknown: What to do about contents of no known kind.

    Raises:
        UnknownArchitectureError: In place of an error about contents of no known kind.
        BrokenCheckpointError: In place of an error about missing or contradictory sizes.
    """
    try:
        yield
    except UnknownWeightsError as error:
        raise UnknownArchitectureError(path, str(error), unknown) from error
    except ValueError as error:  # incomplete weights, or sizes a network cannot have
        raise BrokenCheckpointError(path, str(error).rstrip(".")) from error


def state_dict_in_words(sd: Mapping[str, Any]) -> str:
    """How many tensors a file holds and what some are called."""
    return f"it holds {contents.contents_in_words(sorted(sd))}"


def contents_in_words(sd: Mapping[str, Any]) -> str:
    """What a file is that no family claims: the name of one that is not supported, or the keys."""
    name = unsupported.name_of(sd, detection.unet_prefix_from_state_dict(sd))
    if name is None:
        return f"no known model family: {state_dict_in_words(sd)}"
    return cannot_run(name)


def unknown_architecture(path: str, found: str) -> UnknownArchitectureError:
    """The error for a file that cannot be loaded; `found` says what it is."""
    return UnknownArchitectureError(
        path,
        found,
        f"choose a file of a supported family ({', '.join(detection.supported_titles())})",
    )
