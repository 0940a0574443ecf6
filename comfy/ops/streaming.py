"""Weights that stay off the device and travel to it at use.

`fetch` brings a layer's weight and bias to a device. A layer that belongs to a `StreamPlan` (the
streamed layers of one loaded model) has its copies started ahead of time: the plan learns in which
order layers are used, and while one computes, the next one's weights travel on a copy stream.
A copy stream first waits for what was issued to the computing stream so far. So the memory of a
layer that was used and let go can take the next copy at once: a host that runs ahead of the device
never makes it hold more than the layers in use and on their way. Nothing is copied that is not
used, so a pass moves exactly the bytes of its streamed layers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from comfy.devices import casting

logger = logging.getLogger(__name__)

MAX_AHEAD = 2
"""Layers whose weights may be on the device before their turn."""

Tensors = tuple["torch.Tensor | None", "torch.Tensor | None"]


@dataclass
class Transfer:
    """Copies of one layer's weights under way.

    Attributes:
        tensors: (weight, bias) on the device.
        sources: The host tensors, kept alive until the copies are done.
        done: Event to wait for; None for copies that block.
    """

    tensors: Tensors
    sources: Tensors
    done: Any | None = None


@dataclass(eq=False)
class StreamPlan:
    """The streamed layers of one loaded model on one device.

    Attributes:
        device: Where the layers compute.
        streams: Copy streams, used in turn; empty copies synchronously.
        follower: The layer used after each layer, as last seen.
        ahead: Transfers started for layers whose turn has not come, oldest first.
        held_bytes: Bytes of weights kept on the device after use; a plain plan keeps none.
    """

    device: torch.device
    streams: list[Any] = field(default_factory=list)
    follower: dict[int, Any] = field(default_factory=dict)
    ahead: dict[int, Transfer] = field(default_factory=dict)
    held_bytes: int = 0
    _first: Any = None
    _last: Any = None
    _turn: int = 0

    @classmethod
    def for_device(cls, device: torch.device) -> StreamPlan:
        """A plan with as many copy streams as policy and device allow."""
        count = casting.async_streams(device)
        return cls(device, [torch.Stream(device=device) for _ in range(count)])

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """No plan streams the copy of a layer; it copies its weights as it is used."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Nor one that was pickled: streams belong to this process."""
        return (type(None), ())

    def take(self, layer: Any) -> Tensors:
        """The layer's weight and bias on the device; starts the next layer's copies."""
        tensors = self._arrive(layer)
        self._learn(layer)
        if self.streams:
            self._start_following(layer)
        return tensors

    def _arrive(self, layer: Any) -> Tensors:
        transfer = self.ahead.pop(id(layer), None)
        if transfer is None:
            transfer = self._start(layer, None)
        if transfer.done is not None:
            current = casting.current_stream(self.device)
            current.wait_event(transfer.done)
        return transfer.tensors

    def _learn(self, layer: Any) -> None:
        if self._first is None:
            self._first = layer
        if self._last is not None and layer is not self._first:
            self.follower[id(self._last)] = layer
        self._last = layer

    def _start_following(self, layer: Any) -> None:
        following = self.follower.get(id(layer))
        if following is None or id(following) in self.ahead or self.holds(following):
            return
        while len(self.ahead) >= MAX_AHEAD:  # the order changed: what was foreseen did not come
            self.ahead.pop(next(iter(self.ahead)))
        stream = self.streams[self._turn % len(self.streams)]
        self._turn += 1
        try:
            self.ahead[id(following)] = self._start(following, stream)
        except torch.OutOfMemoryError:
            return  # it travels in its own turn, when this layer's memory is free again

    def holds(self, layer: Any) -> bool:  # noqa: ARG002 - plans that keep weights say otherwise
        """Whether a layer's weights are on the device already."""
        return False

    def drop(self, layer_id: int) -> int:  # noqa: ARG002 - a plain plan keeps none
        """Let go of a layer's weights that are kept on the device; returns the bytes freed."""
        return 0

    def _start(self, layer: Any, stream: Any | None) -> Transfer:
        sources = (layer.weight, getattr(layer, "bias", None))
        if stream is None:
            return Transfer(_moved(sources, self.device, False), sources)
        stream.wait_stream(casting.current_stream(self.device))
        with casting.on_stream(self.device, stream):
            tensors = _moved(sources, self.device, True)
        return Transfer(tensors, sources, stream.record_event())

    @property
    def ahead_bytes(self) -> int:
        """Device bytes of weights whose layers have not used them yet."""
        under_way = list(self.ahead.values())  # another thread may ask in the middle of a run
        tensors = (t for transfer in under_way for t in transfer.tensors)
        return sum(t.nbytes for t in tensors if t is not None)

    def drop_ahead(self) -> None:
        """Let go of what was foreseen, after a pass that ended early.

        Waits for all copies, so that the host tensors they read may be let go afterwards.
        """
        for stream in self.streams:
            stream.synchronize()
        self.ahead.clear()
        self._last = None

    def forget_order(self) -> None:
        """Learn the order of use anew: other layers are streamed from now on."""
        self.drop_ahead()
        self.follower.clear()
        self._first = None

    def close(self) -> None:
        """Finish what is under way; call before the host tensors are let go."""
        self.forget_order()


def _moved(tensors: Tensors, device: torch.device, non_blocking: bool) -> Tensors:
    weight, bias = (
        None if t is None else casting.cast_to(t, device=device, non_blocking=non_blocking)
        for t in tensors
    )
    return weight, bias


def fetch(layer: Any, device: torch.device | None) -> tuple[Any, Any, Any]:
    """A layer's weight and bias on `device`, in their stored types.

    Args:
        layer: Anything with `weight` and `bias`.
        device: Where they are needed; None leaves them where they are.
    Returns:
        (weight, bias, token); hand the token to `release` after use.
    """
    weight, bias = layer.weight, getattr(layer, "bias", None)
    here = device is None or (
        (weight is None or weight.device == device) and (bias is None or bias.device == device)
    )
    if here:
        return weight, bias, None
    plan = getattr(layer, "stream_plan", None)
    if plan is not None and plan.device == device:
        return (*plan.take(layer), plan)
    return (*_moved((weight, bias), device, False), None)  # type: ignore[arg-type]


def release(token: Any, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    """End the use of fetched tensors; the allocator keeps them until the device is done."""
    del token, weight, bias
