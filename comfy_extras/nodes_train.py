"""Training LoRAs and other adapters, and what is done with them."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import Tensor

import folder_paths
from comfy import lora_loading
from comfy.devices import residency
from comfy.weights.lora import convert_lora
from comfy.weights.state_dict import load_torch_file, save_torch_file
from comfy_api.latest import io, ui
from comfy_extras.extension import entrypoint_of
from comfy_extras.nodes_model_merging import next_file
from comfy_extras.training.examples import Example, Picks, paired
from comfy_extras.training.factors import ALGORITHMS, by_weight
from comfy_extras.training.graph import loss_graph
from comfy_extras.training.parts import AdapterPlan, TrainedParts
from comfy_extras.training.run import LOSSES, OPTIMIZERS, TrainingPlan, TrainingRun

NOTHING = "[None]"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STEPS_IN_NAME = re.compile(r"_(\d+)_steps_")


def choice(id: str, options: Any, default: str, tooltip: str) -> io.Combo.Input:
    """One of the names of a table."""
    return io.Combo.Input(id, options=list(options), default=default, tooltip=tooltip)


def count(id: str, default: int, most: int, tooltip: str) -> io.Int.Input:
    """A number of at least one."""
    return io.Int.Input(id, default=default, min=1, max=most, tooltip=tooltip)


def how_inputs() -> list[io.Input]:
    """How training goes on."""
    return [
        count("batch_size", 1, 10000, "Latents that a step sees; they are computed one by one."),
        count(
            "grad_accumulation_steps", 1, 1024, "Steps whose gradients make one change of weights."
        ),
        count("steps", 16, 100000, "How many steps to train."),
        io.Float.Input(
            "learning_rate",
            default=0.0005,
            min=0.0000001,
            max=1.0,
            step=0.0000001,
            tooltip="How far weights go in a step.",
        ),
        count("rank", 8, 128, "Size of the LoRA; of OFT the most rows that are turned together."),
        choice("optimizer", OPTIMIZERS, "AdamW", "Way downhill."),
        choice("loss_function", LOSSES, "MSE", "How an error is counted."),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            tooltip="Of first values, noise, and the order of examples.",
        ),
        choice("training_dtype", DTYPES, "bf16", "What the model computes in."),
        choice("lora_dtype", DTYPES, "bf16", "What the trained weights are kept in."),
        choice("algorithm", ALGORITHMS, "LoRA", "Kind of the trained weights."),
        io.Boolean.Input(
            "gradient_checkpointing",
            default=True,
            tooltip="Take less memory and more time: compute blocks twice.",
        ),
        choice("existing_lora", existing_loras(), NOTHING, "LoRA to go on with."),
        io.Boolean.Input(
            "bucket_mode",
            default=False,
            tooltip="A step sees latents of one bucket only (from Resolution Bucket).",
        ),
    ]


def existing_loras() -> list[str]:
    """Names of LoRA files, after the name for none."""
    return [NOTHING, *folder_paths.get_filename_list("loras")]


def read_existing(name: str, model: Any) -> tuple[dict[str, dict[str, Tensor]], int]:
    """The tensors of a file by weight, and the steps it was trained, as its name says."""
    if name == NOTHING:
        return {}, 0
    path = folder_paths.get_full_path_or_raise("loras", name)
    with torch.inference_mode(False):
        file = convert_lora(load_torch_file(path, safe_load=True))
    found = STEPS_IN_NAME.search(os.path.basename(name))
    return by_weight(file, model), int(found[1]) if found else 0


class TrainLoraNode(io.ComfyNode):
    """Trains a LoRA on latents and their texts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TrainLoraNode",
            display_name="Train LoRA",
            category="training",
            is_experimental=True,
            is_input_list=True,
            inputs=[
                io.Model.Input("model"),
                io.Latent.Input("latents", tooltip="What the model is to learn to make."),
                io.Conditioning.Input(
                    "positive", tooltip="One for all latents, or one for each of them."
                ),
                *how_inputs(),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="With the LoRA."),
                io.LoraModel.Output(display_name="lora", tooltip="To save, or to load."),
                io.LossMap.Output(display_name="loss_map", tooltip="Loss of every step."),
                io.Int.Output(display_name="steps", tooltip="With those of the existing LoRA."),
            ],
        )

    @classmethod
    def execute(
        cls, latents: list[Any], positive: list[Any], **settings: list[Any]
    ) -> io.NodeOutput:
        given = {name: values[0] for name, values in settings.items()}
        with torch.inference_mode(False), torch.enable_grad():
            return trained(given, paired(latents, positive))


def trained(given: dict[str, Any], groups: list[list[Example]]) -> io.NodeOutput:
    """The node's outputs.

    Args:
        given: Its other inputs by name.
        groups: The examples, by bucket.
    """
    model, seed = given["model"], given["seed"]
    if not given["bucket_mode"]:
        groups = [[example for group in groups for example in group]]
    existing, earlier_steps = read_existing(given["existing_lora"], model.model)
    lora_dtype = DTYPES[given["lora_dtype"]]
    plan = AdapterPlan(given["algorithm"], given["rank"], lora_dtype, seed, existing)
    view = model.clone()
    view.set_model_compute_dtype(DTYPES[given["training_dtype"]])
    parts = TrainedParts(view, plan)
    picks = Picks(groups, given["batch_size"], torch.Generator().manual_seed(seed))
    run = TrainingRun(
        view,
        parts.parameters(),
        picks,
        TrainingPlan(
            steps=given["steps"],
            accumulate=given["grad_accumulation_steps"],
            learning_rate=given["learning_rate"],
            optimizer=given["optimizer"],
            loss=given["loss_function"],
            seed=seed,
            recompute=given["gradient_checkpointing"],
        ),
    )
    try:
        losses = run.train()
    finally:
        residency.unload_model_clones(view)  # else its weights would keep their changes at use
    lora = parts.file_tensors()
    changed, _ = lora_loading.load_lora_for_models(model, None, dict(lora), 1.0, 0.0)
    return io.NodeOutput(changed, lora, {"loss": losses}, earlier_steps + given["steps"])


class LoraModelLoader(io.ComfyNode):
    """Adds a trained LoRA to a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoraModelLoader",
            display_name="Load LoRA Model",
            category="loaders",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                io.LoraModel.Input("lora"),
                io.Float.Input("strength_model", default=1.0, min=-100.0, max=100.0),
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model: Any, lora: dict[str, Tensor], strength_model: float) -> io.NodeOutput:
        if strength_model == 0:
            return io.NodeOutput(model)
        changed, _ = lora_loading.load_lora_for_models(model, None, dict(lora), strength_model, 0.0)
        return io.NodeOutput(changed)


class SaveLoRA(io.ComfyNode):
    """Saves a trained LoRA in the output folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveLoRA",
            display_name="Save LoRA Weights",
            category="loaders",
            is_experimental=True,
            is_output_node=True,
            inputs=[
                io.LoraModel.Input("lora"),
                io.String.Input("prefix", default="loras/ComfyUI_trained_lora"),
                io.Int.Input("steps", optional=True, tooltip="Steps, to be named in the file."),
            ],
            outputs=[],
        )

    @classmethod
    def execute(
        cls, lora: dict[str, Tensor], prefix: str, steps: int | None = None
    ) -> io.NodeOutput:
        named = prefix if steps is None else f"{prefix}_{steps}_steps"
        path, _ = next_file(named, folder_paths.get_output_directory())
        save_torch_file(dict(lora), path)
        return io.NodeOutput()


class LossGraphNode(io.ComfyNode):
    """Shows the losses of a training run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LossGraphNode",
            display_name="Plot Loss Graph",
            category="training",
            is_experimental=True,
            is_output_node=True,
            inputs=[
                io.LossMap.Input("loss"),
                io.String.Input("filename_prefix", default="loss_graph"),
            ],
            outputs=[],
        )

    @classmethod
    def execute(cls, loss: dict[str, Any], filename_prefix: str) -> io.NodeOutput:
        if not loss.get("loss"):
            raise ValueError("loss: expected the losses of at least one step, found none")
        saved = ui.ImageSaveHelper.save_images(
            loss_graph(loss["loss"]), filename_prefix, io.FolderType.temp, cls
        )
        return io.NodeOutput(ui=ui.SavedImages(saved))


comfy_entrypoint = entrypoint_of(TrainLoraNode, LoraModelLoader, SaveLoRA, LossGraphNode)
