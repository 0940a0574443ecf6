"""What a weight file is, told from its keys: for the words about one that is in the wrong place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

EXAMPLES = 3  # how many keys a message names

MARKS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    # first match wins: a LoRA names the layers it changes, a checkpoint holds all other kinds
    (("lora_down", "lora_up", "lora_A", "lora_B", "hada_w1", "lokr_w"), "a LoRA", "loras"),
    (("control_model.", "input_hint_block.", "controlnet_", "zero_convs.", "lora_controlnet",
      "body.0.block1."), "a control network", "controlnet"),
    (("cond_stage_model.", "conditioner.embedders.", "first_stage_model."), "a checkpoint",
     "checkpoints"),
    (("model.diffusion_model.", "double_blocks.", "joint_blocks.", "input_blocks.0.0.",
      "down_blocks.0.attentions."), "a diffusion model", "diffusion_models"),
    (("vision_model.", "visual.", "image_encoder."), "an image encoder", "clip_vision"),
    (("text_model.", "transformer.resblocks.", "layer.0.SelfAttention.", "token_embedding."),
     "a text encoder", "text_encoders"),
    (("position_net.",), "a GLIGEN model", "gligen"),
    (("decoder.conv_in.", "decoder.conv1.", "taesd_decoder."), "an autoencoder", "vae"),
    (("emb_params", "string_to_param"), "a textual inversion", "embeddings"),
    (("model.0.weight", "conv_first.", "body.0.rdb1", "upsampler."), "an upscale model",
     "upscale_models"),
)  # fmt: skip
"""Parts of keys -> what a file with them is, and the folder below `models` it belongs in."""


def likely_kind(keys: Iterable[str]) -> tuple[str, str] | None:
    """What a file with these keys most likely is, and its folder; None if nothing tells."""
    whole = "\n".join(map(str, keys))
    for parts, kind, folder in MARKS:
        if any(part in whole for part in parts):
            return kind, folder
    return None


def in_words(keys: Sequence[str]) -> str:
    """Count and examples, such as `12 keys (a.weight, a.bias, b.weight, ...)`."""
    if not keys:
        return "no keys"
    listed = ", ".join(keys[:EXAMPLES]) + (", ..." if len(keys) > EXAMPLES else "")
    return f"{len(keys)} key{'s' if len(keys) > 1 else ''} ({listed})"


def contents_in_words(keys: Sequence[str]) -> str:
    """`in_words`, and what the file seems to be: for one that is not what was asked for."""
    found = likely_kind(keys)
    hint = f"; it looks like {found[0]}, which belongs in models/{found[1]}" if found else ""
    return f"{in_words(keys)}{hint}"
