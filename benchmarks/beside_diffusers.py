"""Sampling steps of a full-size UNet (Stable Diffusion 1.5, XL) beside the same one of diffusers.

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

XL_UNET: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "transformer_depth_middle": 10,
    "context_dim": 2048,
    "num_head_channels": 64,
    "use_linear_in_transformer": True,
    "adm_in_channels": 2816,
    "num_classes": "sequential",
}


@dataclass(frozen=True)
class Family:
    """A size of network.

    Attributes:
        config: Our configuration.
        theirs: Arguments of diffusers' class beyond the common ones.
        pooled: Width of the pooled text, 0 for none.
        scale: Factor between the latent that is sampled and the autoencoder's.
    """

    config: dict[str, Any]
    theirs: dict[str, Any]
    pooled: int
    scale: float


FAMILIES = {
    "sd1": Family(
        UNET, {"attention_head_dim": 8, "block_out_channels": (320, 640, 1280, 1280)}, 0, 0.18215
    ),
    "sdxl": Family(
        XL_UNET,
        {
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", *2 * ("CrossAttnDownBlock2D",)),
            "up_block_types": (*2 * ("CrossAttnUpBlock2D",), "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        1280,
        0.13025,
    ),
}


class DiffusersMissing(Exception):
    """The package to compare with is not installed."""


@dataclass
class Rival:
    """A bare network of diffusers on a trajectory of its own.

    Attributes:
        network: The network.
        memory_format: Layout of its weights and of the latent.
        x: Where its trajectory stands.
        added: What the network takes besides the text, or None.
        seconds: Time of each forward.
    """

    network: Any
    memory_format: torch.memory_format
    x: Tensor
    added: dict[str, Tensor] | None = None
    seconds: list[float] = field(default_factory=list)

    def step(self, context: Tensor, sigma: Tensor, sigma_next: Tensor, timestep: Tensor) -> None:
        """One Euler step with guidance; only the forward is timed."""
        scaled = torch.cat([self.x, self.x]) / (sigma**2 + 1.0).sqrt()
        scaled = scaled.contiguous(memory_format=self.memory_format)
        start = time.perf_counter()
        eps = self.network(
            scaled, timestep, encoder_hidden_states=context, added_cond_kwargs=self.added
        ).sample
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


def _their_network(
    family: Family, weights: dict[str, Tensor], memory_format: torch.memory_format
) -> Any:
    """diffusers' network over the same tensors; in channels-last its convolutions are copies."""
    from comfy.weights.diffusers_unet import unet_to_diffusers

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            network_class = importlib.import_module("diffusers").UNet2DConditionModel
        except ImportError as error:
            raise DiffusersMissing(str(error)) from error
    with torch.device("meta"):
        network = network_class(
            in_channels=4, out_channels=4, cross_attention_dim=family.config["context_dim"],
            **family.theirs,
        )  # fmt: skip
    names = unet_to_diffusers(family.config)
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


def _texts(family: Family, size: int) -> tuple[list[list[Any]], dict[str, Tensor] | None]:
    """Conditioning [negative, positive], and what diffusers' network takes besides its tokens."""
    generator = torch.Generator().manual_seed(2)
    width = family.config["context_dim"]
    tokens = [torch.randn(1, 77, width, generator=generator) for _ in range(2)]
    if not family.pooled:
        return [[[text, {}]] for text in tokens], None
    pooled = [torch.randn(1, family.pooled, generator=generator) for _ in range(2)]
    options = [{"pooled_output": row, "width": size, "height": size} for row in pooled]
    sizes = torch.tensor([[size, size, 0, 0, size, size]] * 2, dtype=torch.float32)
    added = {"text_embeds": torch.cat(pooled), "time_ids": sizes}
    return [[[text, option]] for text, option in zip(tokens, options)], added


def compare(
    size: int, steps: int, layouts: list[str], family_name: str = "sd1"
) -> Callable[[], None]:
    """Run both in turn; returns what prints the report.

    Args:
        size: Side of the picture in pixels.
        steps: Steps of each trajectory after one that warms caches up.
        layouts: Of "contiguous", "channels_last": how diffusers' weights lie.
        family_name: A key of `FAMILIES`.
    Raises:
        DiffusersMissing: diffusers is not installed.
    """
    from comfy.ldm.unet.model import UNetModel
    from comfy.sampling import noise, run

    family = FAMILIES[family_name]
    weights = random_weights(UNetModel(**family.config, device="meta"))
    latent = torch.zeros(1, 4, size // 8, size // 8)
    start = noise.prepare_noise(latent, 1)
    (negative, positive), added = _texts(family, size)
    formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    rivals = {
        name: Rival(_their_network(family, weights, formats[name]), formats[name], start, added)
        for name in layouts
    }
    patcher = _our_patcher(weights)
    sampling = patcher.get_model_object("model_sampling")
    sigmas = torch.linspace(float(sampling.sigma_max), float(sampling.sigma_max) / 2, steps + 2)
    context = torch.cat([negative[0][0], positive[0][0]])
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
        patcher, start, steps + 1, CFG, "euler", "normal", positive, negative, latent,
        sigmas=sigmas, callback=callback, disable_pbar=True, seed=1,
    )  # fmt: skip
    final = sampling.noise_scaling(sigmas[-1:], torch.zeros_like(final), final * family.scale)
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
