"""Hooks: changes that belong to single conditioning entries and follow a schedule.

A hook says what changes (weights, options, injections, models loaded along); a `HookGroup` is what
a conditioning entry carries. Copies of a hook stay the same hook: they share its `hook_ref`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from comfy.ops.encoded import decoded_weights
from comfy.patching.keyframes import HookKeyframeGroup
from comfy.patching.wrappers import merge_nested_dicts
from comfy.weights import lora_report
from comfy.weights.lora import (
    convert_lora,
    model_lora_keys_clip,
    model_lora_keys_unet,
    read_patches,
)

if TYPE_CHECKING:
    from comfy.patching.hook_group import HookGroup


class EnumHookMode(enum.Enum):
    """How weights of hooks are kept between the steps of a run."""

    MinVram = "minvram"
    """Compute them again at every switch."""
    MaxSpeed = "maxspeed"
    """Keep what was computed while memory allows."""


class EnumHookType(enum.Enum):
    """What a hook changes."""

    Weight = "weight"
    ObjectPatch = "object_patch"
    AdditionalModels = "add_models"
    TransformerOptions = "transformer_options"
    Injections = "add_injections"


class EnumWeightTarget(enum.Enum):
    """Which kind of model weight hooks are registered for."""

    Model = "model"
    Clip = "clip"


class EnumHookScope(enum.Enum):
    """Which entries feel a hook: all of a run, or those that carry it."""

    AllConditioning = "all_conditioning"
    HookedOnly = "hooked_only"


class _HookRef:
    """Identity of a hook and its copies."""


def default_should_register(
    hook: Hook,  # noqa: ARG001 - signature of replacements
    model: Any,  # noqa: ARG001
    model_options: dict[str, Any],  # noqa: ARG001
    target_dict: dict[str, Any],  # noqa: ARG001
    registered: HookGroup,  # noqa: ARG001
) -> bool:
    """Every hook is registered unless it brings its own rule."""
    return True


def create_target_dict(target: EnumWeightTarget, **kwargs: Any) -> dict[str, Any]:
    """What hooks are told about the model they are registered with."""
    return {"target": target, **kwargs}


class Hook:
    """Base of all hooks.

    Attributes:
        hook_ref: Identity shared by copies.
        hook_id: Optional name given by a custom node.
        hook_keyframe: Schedule of the strength.
        hook_scope: Which entries feel it.
        custom_should_register: Rule that may refuse a registration.
    """

    def __init__(
        self,
        hook_type: EnumHookType | None = None,
        hook_ref: _HookRef | None = None,
        hook_id: str | None = None,
        hook_keyframe: HookKeyframeGroup | None = None,
        hook_scope: EnumHookScope = EnumHookScope.AllConditioning,
    ) -> None:
        self.hook_type = hook_type
        self.hook_ref = hook_ref or _HookRef()
        self.hook_id = hook_id
        self.hook_keyframe = hook_keyframe or HookKeyframeGroup()
        self.hook_scope = hook_scope
        self.custom_should_register: Callable[..., bool] = default_should_register

    @property
    def strength(self) -> float:
        """Strength at the present step."""
        return self.hook_keyframe.strength

    def initialize_timesteps(self, model: Any) -> None:
        """Prepare the schedule for a run."""
        self.reset()
        self.hook_keyframe.initialize_timesteps(model)

    def reset(self) -> None:
        """Go back to the start of the schedule."""
        self.hook_keyframe.reset()

    def clone(self) -> Hook:
        """Another object that is the same hook, with a schedule shared."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def should_register(
        self,
        model: Any,
        model_options: dict[str, Any],
        target_dict: dict[str, Any],
        registered: HookGroup,
    ) -> bool:
        """Whether the hook takes part in a run."""
        return self.custom_should_register(self, model, model_options, target_dict, registered)

    def add_hook_patches(
        self,
        model: Any,
        model_options: dict[str, Any],
        target_dict: dict[str, Any],
        registered: HookGroup,
    ) -> bool:
        """Register with a model for a run; returns whether it was. The base changes nothing."""
        del model, model_options, target_dict, registered
        return False

    def __eq__(self, other: object) -> bool:
        return self.__class__ is other.__class__ and self.hook_ref is other.hook_ref

    def __hash__(self) -> int:
        return hash(self.hook_ref)


class WeightHook(Hook):
    """Weight patches for the entries that carry it.

    Args:
        strength_model: Multiplier for diffusion models.
        strength_clip: Multiplier for text encoders.

    Attributes:
        lora_name: Of the LoRA file, for messages.
    """

    lora_name = "LoRA of a hook"

    def __init__(self, strength_model: float = 1.0, strength_clip: float = 1.0) -> None:
        super().__init__(EnumHookType.Weight, hook_scope=EnumHookScope.HookedOnly)
        self._strength_model = strength_model
        self._strength_clip = strength_clip
        self.weights: dict[Any, Any] | None = None
        self.weights_clip: dict[Any, Any] | None = None
        self.need_weight_init = True

    @property
    def strength_model(self) -> float:
        """Strength for diffusion models at the present step."""
        return self._strength_model * self.strength

    @property
    def strength_clip(self) -> float:
        """Strength for text encoders at the present step."""
        return self._strength_clip * self.strength

    def add_hook_patches(
        self,
        model: Any,
        model_options: dict[str, Any],
        target_dict: dict[str, Any],
        registered: HookGroup,
    ) -> bool:
        """See the base; a LoRA file's tensors are matched to the model's weights here."""
        if not self.should_register(model, model_options, target_dict, registered):
            return False
        to_clip = target_dict.get("target") == EnumWeightTarget.Clip
        strength = self._strength_clip if to_clip else self._strength_model
        if self.need_weight_init:
            weights = self._read(model.model, to_clip)
        else:
            chosen = self.weights_clip if to_clip else self.weights
            weights = chosen or {}
        model.add_hook_patches(hook=self, patches=weights, strength_patch=strength)
        registered.add(self)
        return True

    def _read(self, module: Any, to_clip: bool) -> dict[Any, Any]:
        """The patches a LoRA file holds for a module; what of it fits nothing is said once a run.

        A file may hold changes of a network and of a text encoder; each is asked for its own.
        """
        lora = convert_lora(self.weights or {})
        keys = model_lora_keys_clip if to_clip else model_lora_keys_unet
        weights, unread = read_patches(lora, keys(module, {}))
        unread = lora_report.of_wanted(unread, network=not to_clip, encoder=to_clip)
        lora_report.warn_unread(unread, lora, self.lora_name)
        wrong = lora_report.misfits(weights, decoded_weights(module))
        lora_report.leave_out(wrong, weights, lora, self.lora_name)
        return weights


class ObjectPatchHook(Hook):
    """Object patches for the entries that carry it."""

    def __init__(self, object_patches: dict[str, Any] | None = None) -> None:
        super().__init__(EnumHookType.ObjectPatch)
        self.object_patches = object_patches


class AdditionalModelsHook(Hook):
    """Models to load together with the one being sampled."""

    def __init__(self, models: list[Any] | None = None, key: str | None = None) -> None:
        super().__init__(EnumHookType.AdditionalModels)
        self.models = models
        self.key = key

    def add_hook_patches(
        self,
        model: Any,
        model_options: dict[str, Any],
        target_dict: dict[str, Any],
        registered: HookGroup,
    ) -> bool:
        """See the base."""
        if not self.should_register(model, model_options, target_dict, registered):
            return False
        registered.add(self)
        return True


class TransformerOptionsHook(Hook):
    """Patches, wrappers and callbacks in `transformer_options`."""

    def __init__(
        self,
        transformers_dict: dict[str, Any] | None = None,
        hook_scope: EnumHookScope = EnumHookScope.AllConditioning,
    ) -> None:
        super().__init__(EnumHookType.TransformerOptions, hook_scope=hook_scope)
        self.transformers_dict = transformers_dict or {}
        self._skip_adding = False

    def add_hook_patches(
        self,
        model: Any,
        model_options: dict[str, Any],
        target_dict: dict[str, Any],
        registered: HookGroup,
    ) -> bool:
        """See the base; options for all entries go into the run's options right away."""
        if not self.should_register(model, model_options, target_dict, registered):
            return False
        added: dict[str, Any] = {"to_load_options": self.transformers_dict}
        self._skip_adding = self.hook_scope == EnumHookScope.AllConditioning
        if self._skip_adding:
            added["transformer_options"] = self.transformers_dict
        registered.add(self)
        merge_nested_dicts(model_options, added, copy_dict1=False)
        return True

    def on_apply_hooks(self, model: Any, transformer_options: dict[str, Any]) -> None:  # noqa: ARG002
        """Add the options for an entry that carries the hook."""
        if not self._skip_adding:
            merge_nested_dicts(transformer_options, self.transformers_dict, copy_dict1=False)


WrapperHook = TransformerOptionsHook
"""The older name."""


class InjectionsHook(Hook):
    """Injections for the entries that carry it."""

    def __init__(self, key: str | None = None, injections: list[Any] | None = None) -> None:
        super().__init__(EnumHookType.Injections)
        self.key = key
        self.injections = injections
