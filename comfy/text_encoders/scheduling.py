"""Encodes a text once per step of a hook schedule, for encoders whose LoRAs change while
sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy.progress import ProgressBar


def encode_scheduled(
    clip: Any,
    tokens: Mapping[str, Any],
    unprojected: bool,
    add_dict: Mapping[str, Any],
    show_pbar: bool,
) -> list[list[Any]]:
    """CONDITIONING of tokens; see ``CLIP.encode_from_tokens_scheduled``."""
    hooks = getattr(clip.patcher, "forced_hooks", None)
    return_pooled = "unprojected" if unprojected else True
    if hooks is None or not clip.use_clip_schedule:
        options = clip.encode_from_tokens(tokens, return_pooled=return_pooled, return_dict=True)
        cond = options.pop("cond")
        options.update(add_dict)
        return [[cond, options]]

    schedule = hooks.get_hooks_for_clip_schedule()
    bar = ProgressBar(len(schedule)) if show_pbar and len(schedule) > 1 else None
    conditioning = []
    clip.load_model(tokens)
    hooks.reset()
    clip.patcher.patch_hooks(None)
    for (start, end), keyframes in schedule:
        for hook, keyframe in keyframes:
            hook.hook_keyframe._current_keyframe = keyframe
        clip.patcher.patch_hooks(hooks)
        options = clip.encode_from_tokens(tokens, return_pooled=return_pooled, return_dict=True)
        cond = options.pop("cond")
        options.update(clip_start_percent=start, clip_end_percent=end)
        options.update(add_dict)
        conditioning.append([cond, options])
        if bar is not None:
            bar.update(1)
    hooks.reset()
    return conditioning
