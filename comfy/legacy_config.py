"""Checkpoints with a configuration file beside them, as the first tools kept them.

The network is recognised from its weights all the same; of the configuration only what weights do
not tell is used: velocity prediction, and the layer of the text encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from comfy.families.model_type import ModelType
from comfy.families.prediction import model_sampling
from comfy.loading import (
    Checkpoint,
    StateDict,
    load_checkpoint_guess_config,
    load_state_dict_guess_config,
)


def load_checkpoint(
    config_path: str | None = None,
    ckpt_path: str | None = None,
    output_vae: bool = True,
    output_clip: bool = True,
    embedding_directory: Any = None,
    state_dict: StateDict | None = None,
    config: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Loads a checkpoint and applies what its configuration adds.

    Args:
        config_path: The configuration, a YAML file; `config` is one already read.
        ckpt_path: The checkpoint; `state_dict` is one already read.
        output_vae, output_clip: Parts that are wanted.
        embedding_directory: Folder or folders of textual inversions.

    Raises:
        ValueError: Neither a checkpoint nor a state dict was given, or it is of no known family.
        WeightFileError: See `load_checkpoint_guess_config`.
    """
    wanted = (output_vae, output_clip, False, embedding_directory)
    if state_dict is not None:
        checkpoint = load_state_dict_guess_config(state_dict, *wanted)
    elif ckpt_path is not None:
        checkpoint = load_checkpoint_guess_config(ckpt_path, *wanted)
    else:
        raise ValueError("load_checkpoint needs ckpt_path or state_dict")
    if checkpoint is None:
        raise ValueError("the state dict is of no known model family")
    if config is None and config_path is not None:
        with open(config_path, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    return _apply(checkpoint, config or {})


def _apply(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with velocity prediction and text layer as configured."""
    params = config.get("model", {}).get("params", {})
    if params.get("parameterization") == "v" and checkpoint.model is not None:
        model = checkpoint.model.clone()
        sampling = model_sampling(model.model.model_config, ModelType.V_PREDICTION)
        model.add_object_patch("model_sampling", sampling)
        checkpoint = checkpoint._replace(model=model)
    text = params.get("cond_stage_config", {}).get("params", {})
    if text.get("layer") == "hidden" and checkpoint.clip is not None:
        checkpoint.clip.clip_layer(int(text["layer_idx"]))
    return checkpoint
