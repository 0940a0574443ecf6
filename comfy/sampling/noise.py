"""Where randomness comes from.

The start noise is always drawn on the CPU from the seed, so one seed means one picture on every
device. Step noise comes from a generator of its own (`default_noise_sampler`) or, for SDE solvers,
from a Brownian tree, whose value over an interval does not depend on how the interval was reached.
Seeds are exact integers modulo 2^64.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comfy.nested_tensor import NestedTensor
from comfy.sampling import brownian

NoiseSampler = Callable[[Any, Any], Tensor]
"""noise_sampler(sigma, sigma_next) -> unit-variance noise for the step between two levels."""

SEED_MASK = 2**64 - 1

HEAD_START_S = 0.002
"""Noise that is drawn ahead waits so long: until the model computes, its small operations and the
drawing ones would only wait for each other."""


def seed_global_generator(seed: int) -> torch.Generator:
    """Seed torch's global CPU generator and return it.

    This is the only place that touches the global generator. It is part of the public behaviour:
    code that draws noise without a generator of its own continues the sequence that starts here.
    """
    if torch.accelerator.is_available():
        return torch.manual_seed(int(seed) & SEED_MASK)  # seeds the devices' generators too
    # Spares 4 ms of looking for any.
    return torch.default_generator.manual_seed(int(seed) & SEED_MASK)


def prepare_noise_inner(
    latent_image: Tensor, generator: torch.Generator, noise_inds: Any = None
) -> Tensor:
    """Unit noise in the shape and dtype of one latent, drawn on the CPU.

    Args:
        latent_image: [B, C, ...].
        noise_inds: None for one draw of the whole batch, else [B] indices: item i receives the
            noise_inds[i]-th of consecutive single draws, so equal indices share their noise.
    Raises:
        ValueError: These are no indices, or neither one nor B.
    """

    def draw(batch: int) -> Tensor:
        return torch.randn(
            (batch, *latent_image.shape[1:]),
            dtype=latent_image.dtype,
            layout=latent_image.layout,
            generator=generator,
            device="cpu",
        )

    if noise_inds is None:
        return draw(latent_image.shape[0])
    wanted = _noise_indices(noise_inds, latent_image.shape[0])
    drawn = {}
    for index in range(max(wanted) + 1):
        noise = draw(1)
        if index in wanted:
            drawn[index] = noise
    return torch.cat([drawn[index] for index in wanted])


def _noise_indices(given: Any, count: int) -> list[int]:
    """Indices of draws for a batch of `count`, as whole numbers from 0 on."""
    indices = np.asarray(given)
    is_whole = np.issubdtype(indices.dtype, np.integer)
    if not is_whole or indices.shape not in ((1,), (count,)) or indices.min() < 0:
        raise ValueError(
            f"batch_index: expected whole numbers from 0 on, one for each of the {count} latents "
            f"of the batch, found {str(given)[:100]}; a node before this one changed the batch "
            "without them"
        )
    return [int(index) for index in indices]


def prepare_noise(latent_image: Any, seed: int, noise_inds: Any = None) -> Any:
    """Start noise for a latent or a nested latent; seeds the global generator.

    Args:
        latent_image: [B, C, ...] or a `NestedTensor` of such, drawn one after the other.
        seed: 0 .. 2^64 - 1.
        noise_inds: See `prepare_noise_inner`.
    """
    generator = seed_global_generator(seed)
    if getattr(latent_image, "is_nested", False):
        parts = latent_image.unbind()
        return NestedTensor([prepare_noise_inner(part, generator, noise_inds) for part in parts])
    return prepare_noise_inner(latent_image, generator, noise_inds)


def empty_noise(latent_image: Any) -> Any:
    """Zeros in the place of start noise, for a latent or a nested latent."""
    if getattr(latent_image, "is_nested", False):
        return NestedTensor([empty_noise(part) for part in latent_image.unbind()])
    return torch.zeros_like(latent_image, device="cpu")


def default_noise_sampler(x: Tensor, seed: int | None = None) -> NoiseSampler:
    """Independent noise for each call, from a generator of its own on the device of x.

    On the CPU the seed is moved by one: the start noise came from the same kind of generator, and
    the first step noise must not repeat it. Without a seed the global generator is used.
    """
    generator = None
    if seed is not None:
        seed = int(seed) + (x.device.type == "cpu")
        generator = torch.Generator(device=x.device)
        generator.manual_seed(seed & SEED_MASK)

    def sample(sigma: Any, sigma_next: Any) -> Tensor:  # noqa: ARG001 - the form of a sampler
        return torch.randn(
            x.shape, dtype=x.dtype, layout=x.layout, device=x.device, generator=generator
        )

    return sample


class BatchedBrownianTree:
    """Brownian motion over [t0, t1], one tree for the batch or one for each seed of a list.

    Args:
        x: Any tensor of the wanted shape, dtype and device.
        t0: One end of the interval.
        t1: The other end; when smaller, increments change sign.
        seed: Entropy, a sequence of one per batch item, or None for a random one.
        cpu: Build the trees on the CPU whatever the device of x.
        w0: A tensor whose shape and dtype the increments take in place of x's.
    """

    def __init__(
        self,
        x: Tensor,
        t0: Any,
        t1: Any,
        seed: int | Sequence[int] | None = None,
        cpu: bool = True,
        w0: Tensor | None = None,
    ) -> None:
        start, end, self._sign = self._ordered(float(t0), float(t1))
        self._low, self._high = (round(time, brownian.DECIMALS) for time in (start, end))
        origin = x if w0 is None else w0
        if seed is None:
            seed = random.getrandbits(63)
        self._per_item = not isinstance(seed, (int, np.integer))
        seeds = [int(number) for number in np.atleast_1d(np.asarray(seed, dtype=object))]
        if self._per_item and len(seeds) != x.shape[0]:
            raise ValueError(f"{len(seeds)} seeds for a batch of {x.shape[0]}; give one per item")
        self._dtype, self._device = x.dtype, x.device
        self._inference = torch.is_inference_mode_enabled()
        self._helper: ThreadPoolExecutor | None = None
        self._wanted = threading.Event()
        self._ahead: dict[tuple[float, float], Future[list[Tensor]]] = {}
        if cpu:
            origin = origin.cpu()
        origins = list(origin) if self._per_item else [origin]
        self._trees = [
            brownian.BrownianTree(
                like, start, end, entropy if entropy >= 0 else entropy & SEED_MASK
            )
            for like, entropy in zip(origins, seeds)
        ]

    @staticmethod
    def _ordered(first: float, second: float) -> tuple[float, float, int]:
        return (first, second, 1) if first < second else (second, first, -1)

    def prepare(self, t0: Any, t1: Any) -> None:
        """Begin to draw, beside what the caller does next, the increment it will ask for."""
        start, end, _ = self._span(t0, t1)
        if (start, end) not in self._ahead:
            if self._helper is None:
                self._helper = ThreadPoolExecutor(1, "brownian motion")
            self._wanted.clear()
            self._ahead[start, end] = self._helper.submit(self._in_time, start, end)

    def __call__(self, t0: Any, t1: Any) -> Tensor:
        """Increment between two times of the interval, shaped like x."""
        start, end, sign = self._span(t0, t1)
        self._wanted.set()
        ready = self._ahead.pop((start, end), None)
        if ready is None:
            wait(self._ahead.values())  # the trees serve one at a time
            increments = self._increments(start, end)
        else:
            increments = ready.result()
        increments = [made.to(self._device, self._dtype) for made in increments]
        total = torch.stack(increments) if self._per_item else increments[0]
        return total * (self._sign * sign)

    def _in_time(self, start: float, end: float) -> list[Tensor]:
        self._wanted.wait(HEAD_START_S)
        return self._increments(start, end)

    def _span(self, t0: Any, t1: Any) -> tuple[float, float, int]:
        first, last = (min(max(float(t), self._low), self._high) for t in (t0, t1))
        return self._ordered(first, last)

    def _increments(self, start: float, end: float) -> list[Tensor]:
        with torch.inference_mode(self._inference):  # of the thread that made the trees
            return [tree(start, end) for tree in self._trees]


class BrownianTreeNoiseSampler:
    """Step noise from a Brownian tree: consistent however the interval is divided.

    Args:
        x: Latent whose shape, dtype and device the noise takes.
        sigma_min: Lowest non-zero level of the run.
        sigma_max: Highest level of the run.
        seed: As in `BatchedBrownianTree`.
        transform: From sigma to the tree's time.
        cpu: Build the tree on the CPU whatever the device of x.
    """

    def __init__(
        self,
        x: Tensor,
        sigma_min: Any,
        sigma_max: Any,
        seed: int | Sequence[int] | None = None,
        transform: Callable[[Any], Any] = lambda sigma: sigma,
        cpu: bool = False,
    ) -> None:
        self.transform, self.device = transform, x.device
        self.draws_on_cpu = cpu or x.device.type == "cpu"
        low, high = transform(torch.as_tensor(sigma_min)), transform(torch.as_tensor(sigma_max))
        self.tree = BatchedBrownianTree(x, low, high, seed, cpu=cpu)

    def prepare(self, sigma: Any, sigma_next: Any) -> None:
        """Begin to draw the noise of a step while the model is called."""
        if self.draws_on_cpu:
            self.tree.prepare(*self._times(sigma, sigma_next))

    def _times(self, sigma: Any, sigma_next: Any) -> tuple[Any, Any]:
        return tuple(self.transform(torch.as_tensor(level)) for level in (sigma, sigma_next))

    def __call__(self, sigma: Any, sigma_next: Any) -> Tensor:
        start, end = self._times(sigma, sigma_next)
        return self.tree(start, end) / (end - start).abs().sqrt().to(self.device)


def brownian_noise(x: Tensor, sigmas: Tensor, seed: int | None, cpu: bool = True) -> NoiseSampler:
    """Brownian tree over the non-zero levels of a run."""
    lowest = sigmas[sigmas > 0].min()
    return BrownianTreeNoiseSampler(x, lowest, sigmas.max(), seed=seed, cpu=cpu)
