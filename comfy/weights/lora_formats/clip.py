"""LoRA keys of CLIP text encoders and of the encoders that come with later families."""

from __future__ import annotations

from collections.abc import Collection

CLIP_LINEARS = (
    "mlp.fc1", "mlp.fc2", "self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj",
    "self_attn.out_proj",
)  # fmt: skip
CLIP_LAYERS = 32


def encoder_names(keys: Collection[str]) -> dict[str, str]:
    """Every encoder matrix under `text_encoders.<its own name>`."""
    return {f"text_encoders.{k[: -len('.weight')]}": k for k in keys if k.endswith(".weight")}


def clip_names(keys: Collection[str]) -> dict[str, str]:
    """The linear layers of CLIP-L, CLIP-G and CLIP-H under the trainers' names."""
    has_l = any(key.startswith("clip_l.") for key in keys)
    prefixes = {
        "clip_h": ("lora_te_{}", "lora_te1_{}", "text_encoder.{}"),
        "clip_l": ("lora_te_{}", "lora_te1_{}", "text_encoder.{}"),
        "clip_g": ("lora_te2_{}", "text_encoder_2.{}")
        if has_l
        else ("lora_te_{}", "text_encoder.{}", "lora_prior_te_{}"),
    }
    names: dict[str, str] = {}
    for encoder, patterns in prefixes.items():
        for layer in range(CLIP_LAYERS):
            for linear in CLIP_LINEARS:
                stem = f"text_model.encoder.layers.{layer}.{linear}"
                target = f"{encoder}.transformer.{stem}.weight"
                if target not in keys:
                    continue
                for pattern in patterns:
                    dotted = pattern.endswith(".{}")
                    names[pattern.format(stem if dotted else stem.replace(".", "_"))] = target
    names.update(_projections(keys))
    return names


def t5_names(keys: Collection[str]) -> dict[str, str]:
    """T5 and BERT encoders: the number of `lora_te` is the encoder's place beside CLIP.

    T5 is the third encoder beside CLIP-G and CLIP-L, the second beside CLIP-L alone (files of both
    numberings exist there), else the first.
    """
    has_l = any(key.startswith("clip_l.") for key in keys)
    has_g = any(key.startswith("clip_g.") for key in keys)
    names: dict[str, str] = {}
    for key in keys:
        if not key.endswith(".weight"):
            continue
        stem = key[: -len(".weight")]
        if stem.startswith("t5xxl.transformer."):
            flat = stem[len("t5xxl.transformer.") :].replace(".", "_")
            numbers = (3,) if has_l and has_g else (2, 3) if has_l else (1,)
            names |= {f"lora_te{number}_{flat}": key for number in numbers}
        elif stem.startswith("hydit_clip.transformer.bert."):
            flat = stem[len("hydit_clip.transformer.bert.") :].replace(".", "_")
            names[f"lora_te1_{flat}"] = key
    return names


def _projections(keys: Collection[str]) -> dict[str, str]:
    spellings = {
        "clip_g.transformer.text_projection.weight": (
            "lora_prior_te_text_projection",
            "lora_te2_text_projection",
        ),
        "clip_l.transformer.text_projection.weight": ("lora_te1_text_projection",),
    }
    return {s: key for key, found in spellings.items() if key in keys for s in found}
