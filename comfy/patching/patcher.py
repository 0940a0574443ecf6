"""ModelPatcher: an executable view of a shared base module under a set of changes.

`model` is the base module, shared by all clones. A view adds patches (how weights change), object
patches, options, hooks and extension points; it copies containers, never weights. Loading makes the
module show the view on a device, within a budget of bytes; unloading is its exact inverse,
whatever was raised in between. The physical side is in `residence` and `loading`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from comfy.devices import accelerators, memory
from comfy.devices.running import patcher_at_work
from comfy.patching import attributes
from comfy.patching.base_module import OnBaseModule
from comfy.patching.equality import same_execution
from comfy.patching.loading import WeightLoading
from comfy.patching.lowvram import LowVramPatch
from comfy.patching.options import OptionSetters, create_model_options_clone
from comfy.patching.recorded_patches import StateDictKeys, record
from comfy.patching.wrappers import CallbacksMP, ExtensionPoints, WrappersMP

logger = logging.getLogger(__name__)


class ModelPatcher(OnBaseModule, OptionSetters, ExtensionPoints, WeightLoading):
    """See the module.

    Args:
        model: Base module, shared.
        load_device: Where it runs.
        offload_device: Where it rests.
        size: Bytes of its weights; 0 means count them when asked.
        weight_inplace_update: Write patched values into the parameters instead of replacing them.
    """

    def __init__(
        self,
        model: nn.Module,
        load_device: torch.device,
        offload_device: torch.device,
        size: int = 0,
        weight_inplace_update: bool = False,
    ) -> None:
        self.size = size
        self.model = model
        self.load_device = load_device
        self.offload_device = offload_device
        self.weight_inplace_update = weight_inplace_update
        self.patches: dict[str, list[Any]] = {}
        self.object_patches: dict[str, Any] = {}
        self.weight_wrapper_patches: dict[str, list[Callable[..., Any]]] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.force_cast_weights = False
        self.patches_uuid = uuid.uuid4()
        self.parent: ModelPatcher | None = None
        self.attachments = {}
        self.additional_models = {}
        self.callbacks = CallbacksMP.init_callbacks()
        self.wrappers = WrappersMP.init_wrappers()
        self.injections = {}
        self.is_injected = False
        self.skip_injection = False
        self.is_clip = False
        self._init_hooks()
        self._publish_state()

    # -- views -----------------------------------------------------------------------------

    def clone(
        self,
        disable_dynamic: bool = False,
        model_override: nn.Module | None = None,
        force_deepcopy: bool = False,
    ) -> ModelPatcher:
        """Another view of the same base module, starting as a copy of this one.

        Args:
            disable_dynamic: The clone must use the classic residency (dynamic patchers only).
            model_override: Base module of the clone, in place of the shared one.
            force_deepcopy: Give the clone a base module of its own, with plain weights.
        """
        model = model_override
        if model is None:
            model = self._copied_model() if force_deepcopy else self.model
        n = self._clone_class(disable_dynamic)(
            model,
            self.load_device,
            self.offload_device,
            self.model_size(),
            weight_inplace_update=self.weight_inplace_update,
        )
        n.patches = {key: list(patches) for key, patches in self.patches.items()}
        n.patches_uuid = self.patches_uuid
        n.object_patches = dict(self.object_patches)
        n.weight_wrapper_patches = {k: list(v) for k, v in self.weight_wrapper_patches.items()}
        n.model_options = create_model_options_clone(self.model_options)
        n.parent = self
        n.force_cast_weights = self.force_cast_weights
        n.is_clip = self.is_clip
        n.skip_injection = self.skip_injection
        self.copy_extensions_to(n)
        self._copy_hooks_to(n)
        for callback in self.get_all_callbacks(CallbacksMP.ON_CLONE):
            callback(self, n)
        return n

    def _clone_class(self, disable_dynamic: bool) -> type[ModelPatcher]:  # noqa: ARG002
        return self.__class__

    def is_clone(self, other: Any) -> bool:
        """Whether another patcher is a view of the same base module."""
        return hasattr(other, "model") and self.model is other.model

    def clone_has_same_weights(self, clone: Any) -> bool:
        """Whether a view of the same module executes identically.

        Compares the identity of the patches, object patches, options, hooks, and what custom nodes
        registered: callbacks, wrappers, injections, attachments and additional models.
        """
        return self.is_clone(clone) and same_execution(self, clone)

    @property
    def model_keys(self) -> set[str]:
        """Keys of the weights that this view touches: by patches, wrappers or hooks."""
        hooked = (key for table in self.hook_patches.values() for key in table)
        return {*self.patches, *self.weight_wrapper_patches, *hooked}

    # -- facts -----------------------------------------------------------------------------

    def model_size(self) -> int:
        """Bytes of all weights."""
        if self.size <= 0:
            self.size = memory.module_size(self.model)
        return self.size

    def get_ram_usage(self) -> int:
        """Bytes of main memory the weights take at most; those of a mapped file take less."""
        return self.model_size()

    def loaded_size(self) -> int:
        """Bytes of weights on the load device now."""
        return int(self._state_shown("model_loaded_weight_memory", self.residence.loaded_bytes))

    def current_loaded_device(self) -> torch.device:
        """Where the resident weights are."""
        place = self._state_shown("device", self.residence.device or self.offload_device)
        return accelerators.with_index(place)

    def lowvram_patch_counter(self) -> int:
        """How many weights are patched at use because they stay off the device."""
        return sum(isinstance(f, LowVramPatch) for f in self.residence.functions())

    def memory_required(self, input_shape: Any) -> float:
        """Bytes a forward over an input of this shape takes beside the weights."""
        return self.model.memory_required(input_shape=input_shape)

    def get_free_memory(self, device: torch.device) -> int:
        """Free bytes of a device."""
        return memory.get_free_memory(device)

    def model_dtype(self) -> torch.dtype | None:
        """Type the network computes in or is stored in, None when it does not say."""
        if hasattr(self.model, "get_dtype"):
            return self.model.get_dtype()
        return None

    def set_model_compute_dtype(self, dtype: torch.dtype | None) -> None:
        """Compute in another type than the weights are stored in."""
        self.add_object_patch("manual_cast_dtype", dtype)
        if dtype is not None:
            self.force_cast_weights = True
        self.patches_uuid = uuid.uuid4()

    # -- objects ---------------------------------------------------------------------------

    def add_object_patch(self, name: str, obj: Any) -> None:
        """Replace an object of the model, by dotted name, while this view is loaded."""
        self.object_patches[name] = obj

    def get_model_object(self, name: str) -> Any:
        """The object under a dotted name as this view shows it."""
        if name in self.object_patches:
            return self.object_patches[name]
        if name in self.residence.objects:
            return self.residence.objects[name].previous
        return attributes.get_attr(self.model, name)

    @property
    def object_patches_backup(self) -> dict[str, Any]:
        """The objects that applied patches replaced, by dotted name; a copy."""
        return {name: swap.previous for name, swap in self.residence.objects.items()}

    def model_patches_models(self) -> list[Any]:
        """Patchers that patches in the options need loaded (objects with a `models` method)."""
        return [m for patch in self._option_patches() if hasattr(patch, "models")
                for m in patch.models()]  # fmt: skip

    def model_patches_to(self, device: torch.device) -> None:
        """Move what patches in the options hold; a patch's `to` may return its replacement."""
        self._map_option_patches(lambda p: p.to(device) if hasattr(p, "to") else p)
        wrapper: Any = self.model_options.get("model_function_wrapper")
        if hasattr(wrapper, "to"):
            self.model_options["model_function_wrapper"] = wrapper.to(device)

    def _option_patches(self) -> list[Any]:
        found: list[Any] = []

        def note(patch: Any) -> Any:
            found.append(patch)
            return patch

        self._map_option_patches(note)
        return found

    def _map_option_patches(self, function: Callable[[Any], Any]) -> None:
        options = self.model_options.get("transformer_options", {})
        for patches in options.get("patches", {}).values():
            patches[:] = [function(patch) for patch in patches]
        for table in options.get("patches_replace", {}).values():
            for where in table:
                table[where] = function(table[where])

    # -- runs ------------------------------------------------------------------------------

    def pre_run(self) -> None:
        """Told before a run starts."""
        if hasattr(self.model, "current_patcher"):
            self.model.current_patcher = self
        for callback in self.get_all_callbacks(CallbacksMP.ON_PRE_RUN):
            callback(self)

    def prepare_state(self, timestep: torch.Tensor) -> None:
        """Told before each step."""
        for callback in self.get_all_callbacks(CallbacksMP.ON_PREPARE_STATE):
            callback(self, timestep)

    def cleanup(self) -> None:
        """Told after a run, whatever happened in it."""
        self.clean_hooks()
        if self.residence.plan is not None:
            self.residence.plan.drop_ahead()
        if hasattr(self.model, "current_patcher"):
            self.model.current_patcher = patcher_at_work(self.model)  # a step may run it as well
        for callback in self.get_all_callbacks(CallbacksMP.ON_CLEANUP):
            callback(self)

    # -- weight patches --------------------------------------------------------------------

    def add_patches(
        self,
        patches: Mapping[Any, Any],
        strength_patch: float = 1.0,
        strength_model: float = 1.0,
    ) -> list[Any]:
        """Record how weights change; nothing is computed until the view is loaded.

        Args:
            patches: key -> change; a key may be (key, offset) or (key, offset, function).
            strength_patch: Multiplier of the changes.
            strength_model: Multiplier of the weights.
        Returns:
            The keys that exist in the model and were recorded.
        """
        with self._without_injections():
            known = StateDictKeys(self.model)
            taken = record(self.patches, patches, (strength_patch, strength_model), known)
        self.patches_uuid = uuid.uuid4()
        return taken

    def model_state_dict_keys(self) -> Any:
        """Keys of the model's state dict without what injections added, as a set-like view."""
        with self._without_injections():
            return self.model.state_dict(keep_vars=True).keys()

    def _without_injections(self) -> AbstractContextManager[None]:
        return self.use_ejected() if self.residence.injected else nullcontext()

    def add_weight_wrapper(self, name: str, function: Callable[..., Any]) -> None:
        """Apply a function to a weight at every use."""
        self.weight_wrapper_patches.setdefault(name, []).append(function)
        self.patches_uuid = uuid.uuid4()

    def get_key_patches(self, filter_prefix: str | None = None) -> dict[str, list[Any]]:
        """Each weight with its patches, in the form another model's patches can hold.

        What only belongs to the code of a weight, such as its scale, is no weight.

        Returns:
            key -> [(weight, convert), patch...]; the weight is the unpatched one.
        """
        self._take_shared_modules()
        out: dict[str, list[Any]] = {}
        for key in self.model_state_dict_keys():
            if filter_prefix is not None and not key.startswith(filter_prefix):
                continue
            if attributes.is_of_code(self.model, key):
                continue
            weight, _, convert = attributes.get_key_weight(self.model, key)
            if key in self.residence.home:
                weight = self.residence.unpatched(key)
            elif key in self.backup:
                weight = self.backup[key].weight
            elif key in self.residence.hooked:
                weight = self.residence.hooked[key]
            out[key] = [(weight, convert or _as_it_is), *self.patches.get(key, ())]
        return out

    def model_state_dict(self, filter_prefix: str | None = None) -> dict[str, torch.Tensor]:
        """The model's state dict, or the part under a prefix."""
        with self._without_injections():
            state = self.model.state_dict()
        if filter_prefix is None:
            return state
        return {key: value for key, value in state.items() if key.startswith(filter_prefix)}

    def __repr__(self) -> str:
        name = type(self.model).__name__
        return f"<{type(self).__name__} of {name}, {len(self.patches)} patched weights>"


def _as_it_is(weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # noqa: ARG001
    """The decoder of weights that are not stored encoded."""
    return weight
