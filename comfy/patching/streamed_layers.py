"""Layers that stay off the device, and the plan of their transfers."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from comfy.ops.streaming import StreamPlan
from comfy.patching.attributes import ABSENT, restore_attribute


class StreamedLayers:
    """The part of a `Residence` that sets what layers need in order to stream their weights."""

    streaming: dict[str, dict[str, Any]]
    streamed: weakref.WeakValueDictionary[str, nn.Module]
    plan: StreamPlan | None

    def stream(self, name: str, module: nn.Module, attributes: dict[str, Any]) -> None:
        """Set instance attributes on a layer that stays off the device."""
        saved = self.streaming.setdefault(name, {})
        self.streamed[name] = module
        for attribute, value in attributes.items():
            if attribute not in saved:
                saved[attribute] = module.__dict__.get(attribute, ABSENT)
            module.__dict__[attribute] = value

    def stop_streaming(self, name: str, module: nn.Module) -> None:
        """Put a layer's own attributes back."""
        for attribute, value in self.streaming.get(name, {}).items():
            restore_attribute(module, attribute, value)
        self.streaming.pop(name, None)
        self.streamed.pop(name, None)

    def open_plan(self, device: torch.device, kind: type[StreamPlan] = StreamPlan) -> StreamPlan:
        """The transfer plan for a device, kept as long as device and kind stay the same."""
        if self.plan is None or self.plan.device != device or type(self.plan) is not kind:
            self.close_plan()
            self.plan = kind.for_device(device)
        return self.plan

    def close_plan(self) -> None:
        """Finish transfers under way; modules still streamed then copy as they are used."""
        if self.plan is not None:
            self.plan.close()
            self.plan = None
