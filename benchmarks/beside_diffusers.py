"""Sampling steps of a full-size Stable Diffusion 1.5 UNet beside the same network of diffusers.

Both networks hold the same random weights and work on the same latent, text contexts and sigmas, in
turn: our step is one of a KSampler run (euler, cfg: batching, guidance and solver included), theirs
the bare forward, once with its weights in the usual layout and once with channels innermost. The
pictures that the two trajectories end in are decoded by one autoencoder and compared. diffusers is
no dependency of the project: `python -m pip install diffusers` puts it beside an installation.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.full_size_checkpoint import AUTOENCODER, UNET

GOAL_RATIO = 1.03
CFG = 7.0


class DiffusersMissing(Exception):
    """The package to compare with is not installed."""


@dataclass
class Rival:
    """A bare network of diffusers on a trajectory of its own.

    Attributes:
        network: The network.
        memory_format: Layout of its weights and of the latent.
        x: Where its trajectory stands.
        seconds: Time of each forward.
    """

    network: Any
    memory_format: torch.memory_format
    x: Tensor
    seconds: list[float] = field(default_factory=list)

    def step(self, context: Tensor, sigma: Tensor, sigma_next: Tensor, timestep: Tensor) -> None:
        """One Euler step with guidance; only the forward is timed."""
        scaled = torch.cat([self.x, self.x]) / (sigma**2 + 1.0).sqrt()
        scaled = scaled.contiguous(memory_format=self.memory_format)
        start = time.perf_counter()
        eps = self.network(scaled, timestep, encoder_hidden_states=context).sample
        self.seconds.append(time.perf_counter() - start)
        uncond, cond = eps.chunk(2)
        self.x = self.x + (uncond + (cond - uncond) * CFG) * (sigma_next - sigma)


def random_weights(network: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights that keep activations finite: norms near 1, others with the inverse fan-in."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for key, value in network.state_dict().items():
        made = torch.empty(value.shape)
        if value.ndim > 1:
            made.normal_(0.0, 1.0 / math.sqrt(value[0].numel()), generator=generator)
        else:
            made.normal_(float(key.endswith("weight")), 0.02, generator=generator)
        weights[key] = made.to(dtype)
    return weights


def _our_patcher(weights: dict[str, Tensor]) -> Any:
    from comfy import loading

    prefixed = {f"model.diffusion_model.{key}": value for key, value in weights.items()}
    return loading.load_diffusion_model_state_dict(prefixed)


def _their_network(weights: dict[str, Tensor], memory_format: torch.memory_format) -> Any:
    """diffusers' network over the same tensors; in channels-last its convolutions are copies."""
    from comfy.weights.diffusers_unet import unet_to_diffusers

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            network_class = importlib.import_module("diffusers").UNet2DConditionModel
        except ImportError as error:
            raise DiffusersMissing(str(error)) from error
    with torch.device("meta"):
        network = network_class(
            in_channels=4, out_channels=4, cross_attention_dim=768, attention_head_dim=8,
            block_out_channels=(320, 640, 1280, 1280),
        )  # fmt: skip
    names = unet_to_diffusers(UNET)
    wanted = network.state_dict().keys()
    theirs = {name: weights[ours] for name, ours in names.items() if name in wanted}
    theirs = {key: value.contiguous() for key, value in theirs.items()}
    network.load_state_dict(theirs, assign=True)
    return network.eval().to(memory_format=memory_format)


def _picture(latent: Tensor) -> Tensor:
    """The latent's picture in levels 0..255, by an autoencoder of random weights."""
    from comfy.ldm.autoencoder.kl import AutoencoderKL

    decoder = AutoencoderKL(ddconfig=AUTOENCODER, embed_dim=4, device="meta")
    decoder.load_state_dict(random_weights(decoder), assign=True)
    picture = decoder.eval().decode(latent / latent.std())
    return (127.5 + 127.5 * picture / picture.abs().max()).round()


def compare(size: int, steps: int, layouts: list[str]) -> Callable[[], None]:
    """Run both in turn; returns what prints the report.

    Args:
        size: Side of the picture in pixels.
        steps: Steps of each trajectory after one that warms caches up.
        layouts: Of "contiguous", "channels_last": how diffusers' weights lie.
    Raises:
        DiffusersMissing: diffusers is not installed.
    """
    from comfy.ldm.unet.model import UNetModel
    from comfy.sampling import noise, run

    weights = random_weights(UNetModel(**UNET, device="meta"))
    latent = torch.zeros(1, 4, size // 8, size // 8)
    start = noise.prepare_noise(latent, 1)
    generator = torch.Generator().manual_seed(2)
    positive, negative = (torch.randn(1, 77, 768, generator=generator) for _ in range(2))
    formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    rivals = {
        name: Rival(_their_network(weights, formats[name]), formats[name], start)
        for name in layouts
    }
    patcher = _our_patcher(weights)
    sampling = patcher.get_model_object("model_sampling")
    sigmas = torch.linspace(float(sampling.sigma_max), float(sampling.sigma_max) / 2, steps + 2)
    context = torch.cat([negative, positive])
    for rival in rivals.values():
        rival.x = sampling.noise_scaling(sigmas[:1], start, latent)
    ours: list[float] = []
    began = time.perf_counter()

    def callback(step: int, *_: Any) -> None:
        nonlocal began
        ours.append(time.perf_counter() - began)
        for rival in rivals.values():
            timestep = sampling.timestep(sigmas[step : step + 1]).float().expand(2)
            rival.step(context, sigmas[step], sigmas[step + 1], timestep)
        began = time.perf_counter()

    final = run.sample(
        patcher, start, steps + 1, CFG, "euler", "normal", [[positive, {}]], [[negative, {}]],
        latent, sigmas=sigmas, callback=callback, disable_pbar=True, seed=1,
    )  # fmt: skip
    final = sampling.noise_scaling(sigmas[-1:], torch.zeros_like(final), final * 0.18215)
    return lambda: _report(ours, rivals, final)


def _report(ours: list[float], rivals: dict[str, Rival], final: Tensor) -> None:
    step = min(ours[1:])
    print("fastest after the first, and all, in seconds (they took turns):")
    print(f"ours, one sampling step     {step:6.2f} s  ({_listed(ours)})")
    forwards = {}
    for name, rival in rivals.items():
        forwards[name] = min(rival.seconds[1:])
        print(f"diffusers, {name:15s}  {forwards[name]:6.2f} s  ({_listed(rival.seconds)})")
    best = min(forwards.values())
    verdict = "met" if step <= GOAL_RATIO * best else "missed"
    print(f"ratio to its better layout {step / best:.3f}, goal {GOAL_RATIO}: {verdict}")
    picture = _picture(final)
    for name, rival in rivals.items():
        apart = (picture - _picture(rival.x)).abs().max().item()
        print(f"pictures differ by at most {apart:.0f} of 255 levels ({name}); goal 2")


def _listed(seconds: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in seconds)
