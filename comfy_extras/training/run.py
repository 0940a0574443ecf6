"""A training run: noisy examples, the model's estimate of the clean ones, and steps downhill."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.patching.options import create_model_options_clone
from comfy.progress import ProgressBar
from comfy.sampling import batching, checks, conditioning, guidance
from comfy_extras.training.checkpointing import kept_for_gradients, recomputed
from comfy_extras.training.examples import Example, Picks
from comfy_extras.training.parts import NETWORK

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "RMSprop": torch.optim.RMSprop,
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "MSE": functional.mse_loss,
    "L1": functional.l1_loss,
    "Huber": functional.huber_loss,
    "SmoothL1": functional.smooth_l1_loss,
}
SEEDS = 2**64


@dataclass(frozen=True)
class TrainingPlan:
    """How a run trains.

    Attributes:
        steps: How often examples are seen.
        accumulate: Steps whose gradients are added before the weights change.
        learning_rate: Of the optimizer.
        optimizer, loss: Rows of their tables.
        seed: Of the choice of examples, levels and noise.
        recompute: Save memory by computing blocks twice.
    """

    steps: int
    accumulate: int
    learning_rate: float
    optimizer: str
    loss: str
    seed: int
    recompute: bool


class TrainingRun(guidance.CFGGuider):
    """Trains parameters that a model's weights are changed by.

    Args:
        patcher: View of the model with the changes.
        parameters: What is trained.
        picks: Which examples the steps see.
        plan: How.

    Attributes:
        losses: Of every step.
    """

    def __init__(
        self, patcher: Any, parameters: Sequence[Tensor], picks: Picks, plan: TrainingPlan
    ) -> None:
        super().__init__(patcher)
        self.parameters, self.picks, self.plan = parameters, picks, plan
        self.losses: list[float] = []
        self._prepared: dict[int, Any] = {}

    def train(self) -> list[float]:
        """The losses of all steps.

        Raises:
            ValueError: A latent does not fit the model.
            ArithmeticError: A loss, or what was trained, is no number.
        """
        examples = [example for group in self.picks.groups for example in group]
        for example in examples:
            checks.check_latent(self.model_patcher, example.latent, example.latent)
        largest = max((example.latent for example in examples), key=torch.numel)
        known = {id(e.conditioning): e.conditioning for e in examples}
        self.inner_set_conds({"positive": [entry for one in known.values() for entry in one]})
        # A guider's run loads the models, and lets go of them again after errors too.
        self.sample(torch.zeros_like(largest), largest, None, torch.ones(1))
        return self.losses

    def inner_sample(
        self, noise: Tensor, latent_image: Tensor, device: Any, *_: Any, **__: Any
    ) -> Tensor:
        """The run itself, with loaded models; the latent comes back as it was."""
        del noise
        network = getattr(self.inner_model, NETWORK)
        saving = recomputed(network) if self.plan.recompute else nullcontext()
        optimizer = OPTIMIZERS[self.plan.optimizer](self.parameters, lr=self.plan.learning_rate)
        bar = ProgressBar(self.plan.steps)
        with kept_for_gradients(self.inner_model), saving:
            for step in range(self.plan.steps):
                throw_exception_if_processing_interrupted()
                self.losses.append(self._step(step, device))
                if (step + 1) % self.plan.accumulate == 0 or step + 1 == self.plan.steps:
                    optimizer.step()
                    optimizer.zero_grad()
                bar.update_absolute(step + 1, self.plan.steps)
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters):
            raise self._diverged(f"what was trained after step {self.plan.steps} is no number")
        return latent_image

    def _diverged(self, found: str) -> ArithmeticError:
        return ArithmeticError(
            f"{found}; lower learning_rate ({self.plan.learning_rate}), or choose fp32 for "
            "training_dtype and lora_dtype"
        )

    def _step(self, step: int, device: Any) -> float:
        """Adds the gradients of one step; returns its loss."""
        generator = torch.Generator().manual_seed((self.plan.seed + step) % SEEDS)
        examples, total = self.picks.next(), 0.0
        for example in examples:
            clean = self.inner_model.process_latent_in(example.latent.to(device))
            percent = float(torch.rand(1, generator=self.picks.generator))
            levels = self.inner_model.model_sampling
            # Its very beginning is above all levels that the model knows.
            level = min(float(levels.percent_to_sigma(percent)), float(levels.sigma_max))
            sigma = torch.full((1,), level, device=device)
            noise = torch.randn(clean.shape, generator=generator).to(clean)
            noisy = levels.noise_scaling(sigma, noise, clean, False)
            estimate = self._estimate(example, noisy, sigma)
            loss = LOSSES[self.plan.loss](estimate.float(), clean.float())
            (loss / len(examples) / self.plan.accumulate).backward()
            total += float(loss.detach()) / len(examples)
        if not math.isfinite(total):
            raise self._diverged(f"the loss of step {step + 1} is {total}")
        return total

    def _estimate(self, example: Example, noisy: Tensor, sigma: Tensor) -> Tensor:
        """The model's estimate of the clean latent."""
        conds, options = self._inputs(example, noisy)
        return batching.calc_cond_batch(self.inner_model, [conds], noisy, sigma, options)[0]

    def _inputs(self, example: Example, noisy: Tensor) -> tuple[Any, dict[str, Any]]:
        """The example's conditioning as the model takes it, and the options of a call."""
        if id(example) not in self._prepared:
            lists = {"positive": conditioning.convert_cond(example.conditioning)}
            processed = conditioning.process_conds(
                self.inner_model, noisy, lists, noisy.device, noisy, None, self.plan.seed,
                latent_shapes=[noisy.shape],
            )  # fmt: skip
            self._prepared[id(example)] = processed["positive"]
        options = create_model_options_clone(self.model_options)
        options.setdefault("transformer_options", {})["sample_sigmas"] = torch.ones(1)
        return self._prepared[id(example)], options
