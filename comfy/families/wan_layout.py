"""Reads the configuration of Wan's video transformers from the keys and shapes of their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from comfy.families.dit_layout import Shapes

MARK = "head.modulation"
HEAD_SIZE = 128  # channels of a head in every network of the layout
PATCH = [1, 2, 2]
# A key that only networks of a kind have -> the kind; the first match wins.
KINDS = (
    ("casual_audio_encoder.encoder.final_linear.weight", "s2v"),
    ("audio_proj.audio_proj_glob_1.layer.bias", "humo"),
    ("face_adapter.fuser_blocks.0.k_norm.weight", "animate"),
)
IMAGE, CAMERA = "img_emb.proj.0.bias", "control_adapter.conv.weight"
PIXELS_OF_CELL = 64  # rays are given for each pixel


USUAL_ANIMATE = {
    "motion_widths": [32, 64, 128, 256, 512, 512, 512, 512],
    "style_dim": 512,
    "motion_dim": 20,
    "motion_depth": 5,
    "face_hidden": 1024,
    "face_heads": 4,
}
USUAL_HUMO = {"audio_in": 51200, "audio_hidden": 512, "audio_width": 1536, "audio_tokens": 16}


def _humo_sizes(shapes: Shapes) -> dict[str, Any]:
    """Sizes of the projection of sound."""
    hidden, audio_in = shapes["audio_proj.audio_proj_glob_1.layer.weight"]
    width = shapes["audio_proj.audio_proj_glob_norm.layer.weight"][0]
    return {
        "audio_in": audio_in,
        "audio_hidden": hidden,
        "audio_width": width,
        "audio_tokens": shapes["audio_proj.audio_proj_glob_3.layer.weight"][0] // width,
    }


USUAL_S2V = {"audio_dim": 1024, "audio_layers": 25, "audio_heads": 4}


def _s2v_sizes(shapes: Shapes) -> dict[str, Any]:
    """Sizes of the encoder of sound."""
    convs = "casual_audio_encoder.encoder.conv1_"
    quarter, audio_dim = shapes[f"{convs}global.conv.weight"][:2]
    return {
        "audio_dim": audio_dim,
        "audio_layers": shapes["casual_audio_encoder.weights"][1],
        "audio_heads": shapes[f"{convs}local.conv.weight"][0] // quarter,
    }


def _animate_sizes(shapes: Shapes) -> dict[str, Any]:
    """Sizes of the encoders of a face."""
    convs = "motion_encoder.enc.net_app.convs."
    count = shapes.count(convs)  # one before and one after the halvings
    halvings = [shapes[f"{convs}{n}.skip.1.weight"][0] for n in range(1, count - 1)]
    style, motions = shapes["motion_encoder.dec.direction.weight"]
    hidden = shapes["face_encoder.conv2.conv.weight"][0]
    return {
        "motion_widths": [shapes[f"{convs}0.0.weight"][0], *halvings],
        "style_dim": style,
        "motion_dim": motions,
        "motion_depth": shapes.count("motion_encoder.enc.fc."),
        "face_hidden": hidden,
        "face_heads": shapes["face_encoder.conv1_local.conv.weight"][0] // hidden,
    }


# What reads the sizes of what is beside the blocks, and those of the published network, which
# configurations leave out.
BESIDE: dict[str, tuple[Callable[[Shapes], dict[str, Any]], dict[str, Any]]] = {
    "animate": (_animate_sizes, USUAL_ANIMATE),
    "humo": (_humo_sizes, USUAL_HUMO),
    "s2v": (_s2v_sizes, USUAL_S2V),
}


def kind_of(shapes: Shapes) -> str:
    """What the network is shown beside text."""
    if "vace_patch_embedding.weight" in shapes:
        return "vace"
    if CAMERA in shapes:
        return "camera" if IMAGE in shapes else "camera_2.2"
    found = next((kind for key, kind in KINDS if key in shapes), None)
    return found or ("i2v" if IMAGE in shapes else "t2v")


def read_wan_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Configuration of the Wan network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "Wan")
    dim = shapes[MARK][-1]
    kind = kind_of(shapes)
    config: dict[str, Any] = {
        "image_model": "wan2.1",
        "model_type": kind,
        "dim": dim,
        "out_dim": shapes["head.head.weight"][0] // math.prod(PATCH),
        "in_dim": shapes["patch_embedding.weight"][1],
        "num_heads": max(1, dim // HEAD_SIZE),
        "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
        "num_layers": shapes.count("blocks."),
        "text_dim": shapes["text_embedding.0.weight"][1],
        "patch_size": PATCH,
        "freq_dim": shapes["time_embedding.0.weight"][1],
        "window_size": [-1, -1],
        "qk_norm": True,
        "cross_attn_norm": True,
        "eps": 1e-6,
    }
    if IMAGE in shapes:
        config["image_dim"] = shapes[IMAGE][0]
    if kind == "vace":
        config["vace_in_dim"] = shapes["vace_patch_embedding.weight"][1]
        config["vace_layers"] = shapes.count("vace_blocks.")
    if "img_emb.emb_pos" in shapes:
        config["flf_pos_embed_token_number"] = shapes["img_emb.emb_pos"][1]
    if "ref_conv.weight" in shapes:
        config["in_dim_ref_conv"] = shapes["ref_conv.weight"][1]
    if kind in BESIDE:
        read, usual = BESIDE[kind]
        config.update({n: size for n, size in read(shapes).items() if size != usual[n]})
    if CAMERA in shapes:
        config["in_dim_control_adapter"] = shapes[CAMERA][1] // PIXELS_OF_CELL
    return config
