"""Nodes that make and join hooks."""

from __future__ import annotations

from typing import Any

import folder_paths
from comfy import loading
from comfy.patching import hook_group
from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import EnumHookType
from comfy.weights.lora_report import of_numbers
from comfy.weights.state_dict import load_torch_file
from comfy_extras.hook_nodes.common import STRENGTH, HookNode


def joined(previous: HookGroup | None, group: HookGroup) -> HookGroup:
    """A group of the hooks of both."""
    return (HookGroup() if previous is None else previous).clone_and_combine(group)


class CreateHookLora(HookNode):
    """A hook that adds a LoRA."""

    def __init__(self) -> None:
        self.loaded_lora: tuple[str, Any] | None = None

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "lora_name": (folder_paths.get_filename_list("loras"),),
                "strength_model": ("FLOAT", dict(STRENGTH)),
                "strength_clip": ("FLOAT", dict(STRENGTH)),
            },
            "optional": {"prev_hooks": ("HOOKS",)},
        }

    RETURN_TYPES = ("HOOKS",)
    CATEGORY = "advanced/hooks/create"

    def run(
        self,
        lora_name: str,
        strength_model: float,
        strength_clip: float,
        prev_hooks: HookGroup | None = None,
    ) -> tuple[HookGroup]:
        """The hook after the previous ones."""
        if strength_model == 0 and strength_clip == 0:
            return (joined(prev_hooks, HookGroup()),)
        path = folder_paths.get_full_path_or_raise("loras", lora_name)
        if self.loaded_lora is None or self.loaded_lora[0] != path:
            self.loaded_lora = (path, of_numbers(load_torch_file(path, safe_load=True), path))
        made = hook_group.create_hook_lora(self.loaded_lora[1], strength_model, strength_clip)
        for hook in made.get_type(EnumHookType.Weight):
            hook.lora_name = lora_name
        return (joined(prev_hooks, made),)


class CreateHookLoraModelOnly(CreateHookLora):
    """A hook that adds a LoRA to diffusion models only."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        types = super().INPUT_TYPES()
        del types["required"]["strength_clip"]
        return types

    FUNCTION = "run_model_only"

    def run_model_only(
        self, lora_name: str, strength_model: float, prev_hooks: HookGroup | None = None
    ) -> tuple[HookGroup]:
        """The hook after the previous ones."""
        return self.run(lora_name, strength_model, 0, prev_hooks)


class CreateHookModelAsLora(HookNode):
    """A hook that turns a model into that of another checkpoint."""

    def __init__(self) -> None:
        self.loaded_weights: tuple[str, Any, Any] | None = None

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "ckpt_name": (folder_paths.get_filename_list("checkpoints"),),
                "strength_model": ("FLOAT", dict(STRENGTH)),
                "strength_clip": ("FLOAT", dict(STRENGTH)),
            },
            "optional": {"prev_hooks": ("HOOKS",)},
        }

    RETURN_TYPES = ("HOOKS",)
    CATEGORY = "advanced/hooks/create"

    def run(
        self,
        ckpt_name: str,
        strength_model: float,
        strength_clip: float,
        prev_hooks: HookGroup | None = None,
    ) -> tuple[HookGroup]:
        """The hook after the previous ones."""
        path = folder_paths.get_full_path_or_raise("checkpoints", ckpt_name)
        if self.loaded_weights is None or self.loaded_weights[0] != path:
            model, clip, *_ = loading.load_checkpoint_guess_config(path, output_vae=False)
            self.loaded_weights = (
                path,
                hook_group.get_patch_weights_from_model(model),
                hook_group.get_patch_weights_from_model(clip.patcher if clip else None),
            )
        _, weights_model, weights_clip = self.loaded_weights
        made = hook_group.create_hook_model_as_lora(
            weights_model, weights_clip, strength_model, strength_clip
        )
        return (joined(prev_hooks, made),)


class CreateHookModelAsLoraModelOnly(CreateHookModelAsLora):
    """A hook that turns a diffusion model into that of another checkpoint."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        types = super().INPUT_TYPES()
        del types["required"]["strength_clip"]
        return types

    FUNCTION = "run_model_only"

    def run_model_only(
        self, ckpt_name: str, strength_model: float, prev_hooks: HookGroup | None = None
    ) -> tuple[HookGroup]:
        """The hook after the previous ones."""
        return self.run(ckpt_name, strength_model, 0, prev_hooks)


class CombineHooks(HookNode):
    """Base of the nodes that join groups of hooks."""

    INPUTS = ""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {},
            "optional": {f"hooks_{letter}": ("HOOKS",) for letter in cls.INPUTS},
        }

    RETURN_TYPES = ("HOOKS",)
    CATEGORY = "advanced/hooks/combine"

    def run(self, **groups: HookGroup | None) -> tuple[HookGroup | None]:
        """One group of all; nothing of nothing."""
        ordered = [groups.get(f"hooks_{letter}") for letter in self.INPUTS]
        return (HookGroup.combine_all_hooks(ordered),)


class CombineHooks2(CombineHooks):
    """Joins two groups of hooks."""

    INPUTS = "AB"


class CombineHooks4(CombineHooks):
    """Joins four groups of hooks."""

    INPUTS = "ABCD"


class CombineHooks8(CombineHooks):
    """Joins eight groups of hooks."""

    INPUTS = "ABCDEFGH"
