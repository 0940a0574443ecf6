"""Skipping model calls where the estimate is about to change little.

From two computed steps the rate is known by which the output moves when the input does. The change
of later outputs is predicted from the way of the input since the last computed step and added up;
until the sum reaches a threshold, the output is taken to be the input plus the difference last
seen. The paper adds up the ways from step to step instead, which lets several times as much change
pass at the same threshold; users' thresholds are made for this sum.
Source: Zhou et al. 2025 (EasyCache), https://arxiv.org/abs/2507.02860, section 3.3.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SUBSAMPLE = 8
"""Changes are measured on every eighth cell of the last two axes."""


def _sparse(x: Tensor) -> Tensor:
    """Some cells of a tensor, as a copy."""
    return x[..., ::SUBSAMPLE, ::SUBSAMPLE].float().clone()


SMALLEST_SIZE = 1e-12


def _size(x: Tensor) -> float:
    return float(x.abs().mean())


@dataclass
class _Seen:
    """What a run has shown so far.

    Attributes:
        sigma, skip: Noise level of the latest decision, and the decision.
        in_span: Whether steps may be skipped at that level.
        input, output: Input and output of the latest computed step.
        size: Mean size of that output, before some of its cells were chosen.
        rate: Change of the output per change of the input.
        sum: Predicted change since the latest computed step.
        differences: Output minus input, by what it was computed for.
        lead: What the inputs and outputs above are of: the first that was computed, so that they
            are the same whether entries share a call or not.
    """

    sigma: float | None = None
    skip: bool = False
    in_span: bool = False
    input: Tensor | None = None
    output: Tensor | None = None
    size: float = 0.0
    rate: float | None = None
    sum: float = 0.0
    differences: dict[Hashable, Tensor] = field(default_factory=dict)
    lead: Hashable = None
    computed: int = 0
    skipped: int = 0


class StepCache:
    """Decides for each step whether the model is called.

    Args:
        threshold: Predicted relative change of the output that is let pass in all.
        start_sigma, end_sigma: Levels between which steps may be skipped; not at the end itself.
        verbose: Log every decision.
        watches_all: Note inputs and outputs also before that; else the first step within it is
            the first that is seen.
    """

    def __init__(
        self,
        threshold: float,
        start_sigma: float,
        end_sigma: float,
        verbose: bool = False,
        watches_all: bool = False,
    ) -> None:
        self.threshold, self.verbose, self.watches_all = threshold, verbose, watches_all
        self.start_sigma, self.end_sigma = start_sigma, end_sigma
        self.reset()

    def reset(self) -> None:
        """Forget everything: a run begins or has ended."""
        self._seen = _Seen()

    @property
    def computed(self) -> int:
        """Estimates of the run that called the model."""
        return self._seen.computed

    @property
    def skipped(self) -> int:
        """Estimates of the run that did not."""
        return self._seen.skipped

    def begin_estimate(self) -> None:
        """Decide anew: what comes is of another input, be it at the same noise level, as the second
        slope of a Heun step and the first one of the next."""
        self._seen.sigma = None

    def skips(self, x: Tensor, sigma: float, keys: Sequence[Hashable]) -> bool:
        """Whether the output for input x can be predicted.

        The decision is made once for an estimate and holds for all calls that make it.

        Args:
            keys: What the call is for; each must have been computed before.
        """
        seen = self._seen
        if sigma != seen.sigma:
            seen.sigma, seen.in_span = sigma, self.end_sigma < sigma <= self.start_sigma
            seen.skip = seen.in_span and self._decide(x.chunk(len(keys))[0])
            seen.skipped += seen.skip
            seen.computed += not seen.skip
        known = all(
            key in seen.differences and seen.differences[key].shape[2:] == x.shape[2:]
            for key in keys
        )
        return seen.skip and known

    def _decide(self, x: Tensor) -> bool:
        seen = self._seen
        if seen.rate is None or seen.input is None:
            return False
        current = _sparse(x[:, : seen.input.shape[1]])  # without what stands beside the latent
        if seen.input.shape != current.shape:
            return False
        seen.sum += seen.rate * _size(current - seen.input) / max(seen.size, SMALLEST_SIZE)
        skip = seen.sum < self.threshold
        if not skip:
            seen.sum = 0.0
        if self.verbose:
            verb = "skips" if skip else "computes"
            logger.info("step cache %s at sigma %.4f: change %.4f", verb, seen.sigma, seen.sum)
        return skip

    def predict(self, x: Tensor, keys: Sequence[Hashable]) -> Tensor:
        """Output for x, whose batch is divided evenly among the keys."""
        parts = []
        for part, key in zip(x.chunk(len(keys)), keys):
            difference = self._seen.differences[key]
            parts.append(part[:, : difference.shape[1]] + difference)
        return torch.cat(parts)

    def learn(self, x: Tensor, output: Tensor, keys: Sequence[Hashable]) -> None:
        """Take note of a computed output."""
        seen = self._seen
        for part, made, key in zip(x.chunk(len(keys)), output.chunk(len(keys)), keys):
            kept = part[:, : made.shape[1]]
            if kept.shape != made.shape:  # a network of another kind: nothing to predict from
                continue
            seen.differences[key] = (made - kept).detach()
            if seen.lead in (None, key) and (seen.in_span or self.watches_all):
                seen.lead = key
                self._measure(_sparse(kept), _sparse(made))
                seen.size = _size(made.float())

    def _measure(self, x: Tensor, output: Tensor) -> None:
        """Update the rate from this computed step and the one before it."""
        seen = self._seen
        before, before_output = seen.input, seen.output
        if (
            seen.in_span
            and before is not None
            and before_output is not None
            and before.shape == x.shape
            and (moved := _size(x - before)) > 0
        ):
            seen.rate = _size(output - before_output) / moved
        seen.input, seen.output = x, output


class CachedRun:
    """Wrapper of kind "outer_sample": a cache starts empty and says afterwards what it saved."""

    def __init__(self, cache: StepCache) -> None:
        self.cache = cache

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.cache.reset()
        try:
            return executor(*args, **kwargs)
        finally:
            done, skipped = self.cache.computed, self.cache.skipped
            if done + skipped:
                speed = (done + skipped) / max(done, 1)
                logger.info("step cache: %d of %d estimates skipped (%.2f times as fast)",
                            skipped, done + skipped, speed)  # fmt: skip
            self.cache.reset()


FURTHER = "further_estimate"
"""Transformer option: what a further estimate is for that is made of the entry of another one, from
another input. Those with other blocks replaced are told apart by that."""


def _keys_of(options: dict[str, Any]) -> list[Hashable]:
    """What the parts of a call are for: an entry, the blocks that are replaced, a window."""
    replaced = frozenset(
        (table, place)
        for table, places in (options.get("patches_replace") or {}).items()
        for place in places
    )
    facts: tuple[Hashable, ...] = (options.get(FURTHER), replaced)
    window = options.get("context_window")
    if window is not None:
        facts = (*facts, window.dim, tuple(window.index_list))
    return [(key, *facts) for key in options.get("uuids") or ()]


class EstimateBeginning:
    """Wrapper of kind "predict_noise": tells the cache where an estimate begins."""

    def __init__(self, cache: StepCache) -> None:
        self.cache = cache

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.cache.begin_estimate()
        return executor(*args, **kwargs)


class CachedNetwork:
    """Wrapper of kind "diffusion_model": predicts the network's output for each entry."""

    def __init__(self, cache: StepCache) -> None:
        self.cache = cache

    def __call__(self, executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("transformer_options") or _options_among(args)
        keys, sigmas = _keys_of(options), options.get("sigmas")
        if not keys or sigmas is None or not torch.is_tensor(x):
            return executor(x, *args, **kwargs)
        if self.cache.skips(x, float(sigmas[0]), keys):
            return self.cache.predict(x, keys)
        output = executor(x, *args, **kwargs)
        if torch.is_tensor(output):
            self.cache.learn(x, output, keys)
        return output


def _options_among(args: Sequence[Any]) -> dict[str, Any]:
    """The transformer options of a positional call."""
    return next((arg for arg in args if isinstance(arg, dict) and "sigmas" in arg), {})


class CachedEstimate:
    """Wrapper of kind "predict_noise": predicts the guided estimate as a whole."""

    def __init__(self, cache: StepCache) -> None:
        self.cache = cache

    def __call__(
        self, executor: Any, x: Tensor, timestep: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        keys = ("guided",)
        self.cache.begin_estimate()
        if self.cache.skips(x, float(timestep[0]), keys):
            return self.cache.predict(x, keys)
        output = executor(x, timestep, *args, **kwargs)
        self.cache.learn(x, output, keys)
        return output
