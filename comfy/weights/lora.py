"""LoRA files: which names a model's weights have in them, and the patches they hold."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch

from comfy import progress
from comfy.weights.adapters import ADAPTERS, IA3Adapter, WeightAdapterBase
from comfy.weights.lora_formats import ENCODER_LAYOUTS, NETWORK_LAYOUTS
from comfy.weights.lora_formats.respelled import respelled
from comfy.weights.lora_formats.whole_file import convert_lora
from comfy.weights.lora_report import nothing_fits, warn_unread

logger = logging.getLogger(__name__)

__all__ = [
    "convert_lora",
    "load_lora",
    "model_lora_keys_clip",
    "model_lora_keys_unet",
    "read_patches",
    "require_match",
    "unused_keys",
]


def model_lora_keys_unet(model: Any, key_map: dict[str, Any] | None = None) -> dict[str, Any]:
    """LoRA file key -> weight of a diffusion model.

    Args:
        model: Base model with `diffusion_model` and `model_config.unet_config`.
        key_map: Extended in place and returned.
    """
    names = {} if key_map is None else key_map
    keys = model.state_dict(keep_vars=True).keys()
    config = getattr(getattr(model, "model_config", None), "unet_config", None) or {}
    for layout in NETWORK_LAYOUTS:
        names.update(layout(keys, config))
    return names


def model_lora_keys_clip(model: Any, key_map: dict[str, Any] | None = None) -> dict[str, Any]:
    """LoRA file key -> weight of a text encoder; `key_map` is extended in place and returned."""
    names = {} if key_map is None else key_map
    keys = model.state_dict(keep_vars=True).keys()
    for layout in ENCODER_LAYOUTS:
        names.update(layout(keys, {}))
    return names


def load_lora(
    lora: Mapping[str, torch.Tensor], to_load: Mapping[str, Any], log_missing: bool = True
) -> dict[Any, Any]:
    """Read the patches a file holds for the given keys.

    Args:
        lora: The file's tensors.
        to_load: file key -> target, as the LoRA layouts give it.
        log_missing: Warn about tensors nobody asked for.
    Returns:
        target -> patch, ready for `ModelPatcher.add_patches`.
    """
    patches, unread = read_patches(lora, to_load)
    if log_missing:
        warn_unread(unread, lora)
    return patches


def read_patches(
    lora: Mapping[str, torch.Tensor], to_load: Mapping[str, Any]
) -> tuple[dict[Any, Any], list[str]]:
    """(target -> patch, the file's keys that nothing was read from); arguments of `load_lora`."""
    used: set[str] = set()
    patches = _read(lora, to_load, used)
    for name, meaning in respelled(unused_keys(lora, used), to_load).items():
        read: set[str] = set()
        for target, patch in _read(lora, {name: meaning.target}, read).items():
            place = meaning.place(target, rows_changed(patch))
            if place is not None:
                patches.setdefault(place, patch)
                used |= read
    return patches, unused_keys(lora, used)


def _read(
    lora: Mapping[str, torch.Tensor], names: Mapping[str, Any], used: set[str]
) -> dict[Any, Any]:
    """target -> patch for the names a file has; the keys read are added to `used`."""
    patches: dict[Any, Any] = {}
    for x, target in names.items():
        found = _adapter(x, lora, used)
        if found is not None:
            patches[target] = found
        patches.update(_plain_patches(x, target, lora, used))
    return patches


def rows_changed(patch: Any) -> int | None:
    """How many rows of a weight a patch changes; None where its tensors do not tell."""
    if isinstance(patch, WeightAdapterBase):
        extent = patch.extent()
        return None if extent is None else extent[0]
    tensor = patch[1][0]
    return tensor.shape[0] if tensor.ndim else None


def unused_keys(lora: Mapping[str, torch.Tensor], used: Collection[str]) -> list[str]:
    """Keys of a file that no patch was read from."""
    return [key for key in lora if key not in used]


def _adapter(x: str, lora: Mapping[str, torch.Tensor], used: set[str]) -> WeightAdapterBase | None:
    alpha = lora.get(f"{x}.alpha")
    dora_scale = lora.get(f"{x}.dora_scale")
    if alpha is not None and alpha.numel() != 1:
        progress.warn(
            logger, "'%s.alpha' has the shape %s, not one number: its change is left out",
            x, tuple(alpha.shape),
        )  # fmt: skip
        return None
    for kind in ADAPTERS:
        keys: set[str] = set()
        found = kind.load(x, lora, None if alpha is None else alpha.item(), dora_scale, keys)
        if found is not None:
            used.update(keys)
            used.update(k for k in (f"{x}.alpha", f"{x}.dora_scale") if k in lora)
            return found
    return None


def _plain_patches(
    x: str, target: Any, lora: Mapping[str, torch.Tensor], used: set[str]
) -> dict[Any, Any]:
    """Differences and replacements stored uncompressed, for a weight and its bias."""
    patches: dict[Any, Any] = {}
    bias = _bias_beside(target)
    for suffix, kind, where in (
        ("w_norm", "diff", target),
        ("b_norm", "diff", bias),
        ("diff", "diff", target),
        ("diff_m", "diff", target),
        ("diff_b", "diff", bias),
        ("set_weight", "set", target),
    ):
        key = f"{x}.{suffix}"
        if key in lora and where is not None:
            used.add(key)
            patches[where] = (kind, (lora[key],))
    if f"{x}.ia3_l" in lora and bias is not None:  # it scales outputs, and so the bias too
        scaled = IA3Adapter.load(x, lora, None, None)
        if scaled is not None and not scaled.weights[1]:
            patches[bias] = scaled
    for up, down in (("lora_B", "lora_A"), ("lora_up", "lora_down")):
        key = f"{x}.{up}.bias"  # of the factor itself, so it is scaled as the product is
        if key in lora and bias is not None:
            used.add(key)
            alpha, factor = lora.get(f"{x}.alpha"), lora.get(f"{x}.{down}.weight")
            has_scale = alpha is not None and alpha.numel() == 1 and factor is not None
            scale = alpha.item() / factor.shape[0] if has_scale else 1.0  # type: ignore[union-attr]
            patches[bias] = ("diff", (lora[key].float() * scale,))  # float8 has no product
    return patches


def _bias_beside(target: Any) -> Any:
    """The bias of the layer that a target is the weight of, or the same part of it; None for what
    is no weight."""
    if isinstance(target, str):
        return target[: -len(".weight")] + ".bias" if target.endswith(".weight") else None
    key = _bias_beside(target[0])
    return None if key is None else (key, *target[1:])


def require_match(
    applied: Collection[Any],
    lora: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    model: str = "",
) -> None:
    """Check that something of a LoRA file was applied.

    Args:
        applied: Keys that models took.
        lora: The file's tensors.
        path: Its path, for the message.
        model: Family of the model, for the message.
    Raises:
        NoMatchingWeightsError: Nothing was applied.
    """
    if not applied:
        raise nothing_fits(lora, path, model)
