"""Every node offered has exactly the recorded interface."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import nodes
from comfy_execution.node_info import node_info
from comfy_execution.registry import NodeRegistry
from comfy_extras.modules import MODULES
from comfy_nodes import extras

# Texts for people are written anew, so they are no part of the record.
TEXTS = {"tooltip", "description", "output_tooltips"}
# Keys that newer servers add and the record does not have.
ADDED = {"search_aliases", "api_node", "has_intermediate_output", "is_input_list"}
# File lists depend on the machine: these inputs offer names of files first.
FILE_LISTS = {
    "ckpt_name",
    "config_name",
    "lora_name",
    "vae_name",
    "clip_name",
    "clip_name1",
    "clip_name2",
    "unet_name",
    "latent",
    "image",
}

# Likewise, inputs of schemas that offer names of folders or files.
NAME_LISTS = {"folder", "existing_lora", "ckpt_name", "text_encoder"}


def without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_texts(item) for key, item in value.items() if key not in TEXTS}
    if isinstance(value, list):
        return [without_texts(item) for item in value]
    return value


def comparable(info: dict[str, Any]) -> dict[str, Any]:
    """The parts of a listing entry that are the same on every machine."""
    cleaned = without_texts({key: value for key, value in info.items() if key not in ADDED})
    for section in cleaned["input"].values():
        for name, declared in section.items():
            if name in FILE_LISTS and isinstance(declared[0], list):
                declared[0] = "file list"
            if name in NAME_LISTS and declared[0] == "COMBO":
                declared[1]["options"] = "name list"
            if len(declared) == 2 and declared[1] == {}:
                section[name] = declared[:1]
    return cleaned


@pytest.fixture(scope="module")
def offered() -> dict[str, dict[str, Any]]:
    """Listing entries of all built-in nodes."""
    assert asyncio.run(nodes.init_builtin_extra_nodes()) == []
    registry = NodeRegistry(nodes.NODE_CLASS_MAPPINGS, nodes.NODE_DISPLAY_NAME_MAPPINGS)
    listed = {}
    for name in registry:
        spec = registry.get(name)
        assert spec is not None
        entry = node_info(spec, registry.display_name(name))
        listed[name] = json.loads(json.dumps(entry, allow_nan=False))
    return listed


# Nodes that only this server has, two that the recorded one lacked a package for, and those that
# the reference has as packs.
OWN_NODES = {
    "UnetLoaderGGUF",
    "UnetLoaderGGUFAdvanced",
    "CLIPLoaderGGUF",
    "DualCLIPLoaderGGUF",
    "TripleCLIPLoaderGGUF",
    "QuadrupleCLIPLoaderGGUF",
    "SaveImageWebsocket",
    "NAGuidance",
    "CLIPSetWeightInterpretation",
    "UpscaleModelLoader",
    "ImageUpscaleWithModel",
    # Of later versions of the reference, in workflows that people pass on.
    "CFGOverride",
    "CameraAngle",
    "ColorToRGBInt",
    "ComfyMathExpression",
    "ComfyNumberConvert",
    "ConditioningLoader",
    "CreateBoundingBoxes",
    "CreateList",
    "EmptyAceStep1.5LatentAudio",
    "EndLoop",
    "GetItemFromList",
    "ImageCompare",
    "ImageCropV2",
    "JsonExtractString",
    "LTXVDualCFGGuider",
    "MeshToFile3D",
    "ModelAttentionBackend",
    "Painter",
    "Preview3DAdvanced",
    "PrimitiveBoundingBox",
    "ResolutionSelector",
    "Save3DAdvanced",
    "SaveAudioAdvanced",
    "SaveConditioning",
    "SaveImageAdvanced",
    "SaveText",
    "SeedNode",
    "StartLoop",
    "StringFormat",
    "TextEncodeAceStepAudio1.5",
    "TextGenerate",
    "TextGenerateLTX2Prompt",
    "Video Slice",
    # What StartLoop and EndLoop put into a running graph; no menu offers them.
    "LoopRound",
    "LoopTurn",
}


# Optional inputs that only this server has, each behind all that are recorded: node -> its name.
OWN_INPUTS = {"CLIPTextEncode": "weight_interpretation"}


# Choices of menus that only this server has, behind all that are recorded: node -> input, choices.
OWN_CHOICES = {"DualCLIPLoader": ("type", ["ace"])}


def without_own_choices(name: str, info: dict[str, Any]) -> dict[str, Any]:
    """A listing entry as it would be without the choices that the record lacks."""
    if name not in OWN_CHOICES:
        return info
    field, own = OWN_CHOICES[name]
    declared = info["input"]["required"][field]
    choices = declared[0]
    assert choices[-len(own) :] == own
    required = {**info["input"]["required"], field: [choices[: -len(own)], *declared[1:]]}
    return {**info, "input": {**info["input"], "required": required}}


def without_own_input(name: str, info: dict[str, Any]) -> dict[str, Any]:
    """A listing entry as it would be without the input that the record lacks.

    It has to be optional, with a default, and behind all others.
    """
    own = OWN_INPUTS.get(name)
    if own is None:
        return info
    inputs, order = ({**info[key]} for key in ("input", "input_order"))
    *others, last = order["optional"]
    assert last == own
    assert list(order)[-1] == "optional"
    assert inputs["optional"][own][1]["default"] in inputs["optional"][own][0]
    order["optional"] = others
    inputs["optional"] = {key: inputs["optional"][key] for key in others}
    if not others:
        del order["optional"], inputs["optional"]
    return {**info, "input": inputs, "input_order": order}


@pytest.fixture(scope="module")
def recorded(spec_folder: Path) -> dict[str, dict[str, Any]]:
    return json.loads((spec_folder / "object_info.json").read_text(encoding="utf-8"))


def test_every_node_has_the_recorded_interface(
    offered: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]]
) -> None:
    kept = {
        name: without_own_choices(name, without_own_input(name, info))
        for name, info in offered.items()
    }
    different = [
        name
        for name, info in kept.items()
        if name in recorded and comparable(info) != comparable(recorded[name])
    ]
    details = {name: (comparable(kept[name]), comparable(recorded[name])) for name in different[:1]}
    assert not different, details


def test_no_node_is_offered_under_a_name_that_is_not_recorded(
    offered: dict[str, dict[str, Any]], recorded: dict[str, dict[str, Any]]
) -> None:
    assert set(offered) - set(recorded) == OWN_NODES


def test_every_module_of_the_table_offers_nodes(offered: dict[str, dict[str, Any]]) -> None:
    modules = {info["python_module"] for info in offered.values()}
    assert {f"comfy_extras.{name}" for name in MODULES} <= modules


def test_every_node_of_the_core_says_what_its_function_is() -> None:
    for name, node in nodes.NODE_CLASS_MAPPINGS.items():
        function = getattr(node, node.FUNCTION, None)
        assert callable(function), name


def test_a_module_that_fails_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    added: dict[str, Any] = {}

    def add(new: Any, titles: Any) -> None:
        added.update(new)

    failed = asyncio.run(
        extras.init_builtin_extra_nodes(add, ["nodes_that_do_not_exist", "nodes_mask"])
    )
    assert failed == ["nodes_that_do_not_exist"]
    assert "GrowMask" in added
    assert "nodes_that_do_not_exist" in caplog.text
