"""What a run refuses or warns about, with the numbers that do not fit."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from comfy import progress

logger = logging.getLogger(__name__)

AXES = {
    3: "batch, channels, length",
    4: "batch, channels, rows, columns",
    5: "batch, channels, time, rows, columns",
}
BATCH = 0  # axis of a latent
TEXT = "c_crossattn"  # the network's argument for the tokens of a text


def check_latent(patcher: Any, noise: Tensor, latent_image: Tensor) -> None:
    """Refuse a latent that the model or the noise does not fit.

    Raises:
        ValueError: It is no latent or an empty one, the channels are not the model's, or noise and
            latent differ in shape.
    """
    check_is_latent(latent_image)
    wanted = patcher.get_model_object("latent_format").latent_channels
    if latent_image.ndim >= 4 and latent_image.shape[1] != wanted:
        raise ValueError(
            f"the latent has {latent_image.shape[1]} channels (shape "
            f"{tuple(latent_image.shape)}), the model works on {wanted}; encode the picture with "
            "this model's VAE or use an empty latent"
        )
    if noise.shape[1:] != latent_image.shape[1:]:
        raise ValueError(
            f"noise of shape {tuple(noise.shape)} does not fit a latent of shape "
            f"{tuple(latent_image.shape)}"
        )


def check_is_latent(latent_image: Tensor) -> None:
    """Refuse what no model could sample.

    Raises:
        ValueError: There are no axes for batch, channels and cells, or no cells, or whole numbers.
    """
    if latent_image.ndim < 3 or latent_image.numel() == 0:
        raise ValueError(
            "a latent is [batch, channels, ...] and holds one cell at least, found shape "
            f"{tuple(latent_image.shape)}; a node before this one cut off all there was, or gave "
            "something that is no latent"
        )
    if not latent_image.is_floating_point():
        raise ValueError(
            f"a latent holds real numbers, found {latent_image.dtype} (shape "
            f"{tuple(latent_image.shape)}); a node before this one gave something that is no latent"
        )


def check_axes(model: Any, latent_image: Tensor, model_options: Mapping[str, Any]) -> None:
    """Refuse the latent of a video for a model of pictures, and the like.

    Nothing is checked where code of the run stands between the latent and the network: it may make
    it fit.

    Args:
        model: A base model; `latent_axes()`, if it has it, gives the axes its network takes.

    Raises:
        ValueError: With the axes that were expected and found.
    """
    wanted: int = getattr(model, "latent_axes", lambda: latent_image.ndim)()
    if latent_image.ndim != wanted and not _code_stands_between(model_options):
        raise ValueError(
            f"the model takes latents of {wanted} axes ({AXES[wanted]}), found one of "
            f"{latent_image.ndim}, {tuple(latent_image.shape)}; use an empty latent of this "
            "model's kind, or encode with its VAE"
        )


def check_members(members: Sequence[Tensor]) -> None:
    """Refuse latents that cannot be sampled together.

    Raises:
        ValueError: One of them is no latent, or they are of batches of different sizes.
    """
    for member in members:
        check_is_latent(member)
    if len({member.shape[BATCH] for member in members}) > 1:
        raise ValueError(
            "latents that are sampled together (video with its sound) are of one batch, found "
            f"shapes {', '.join(str(tuple(member.shape)) for member in members)}; make both with "
            "the same batch_size"
        )


def check_parts(
    model: Any, shapes: Sequence[Sequence[int]], model_options: Mapping[str, Any]
) -> None:
    """Refuse a latent of several parts for a model that does not take such parts.

    Nothing is checked where code of the run stands between the latent and the network.

    Args:
        model: A base model; `parts_wanted(shapes)`, if it has it, gives what the model takes in
            place of these, or nothing where they fit.

    Raises:
        ValueError: With the parts that were expected and found.
    """
    wanted: str = getattr(model, "parts_wanted", lambda _: "")(shapes)
    if wanted and not _code_stands_between(model_options):
        raise ValueError(
            f"the model takes {wanted}, found a latent of {len(shapes)} parts of shapes "
            f"{', '.join(str(tuple(shape)) for shape in shapes)}; use empty latents of this "
            "model's kind, joined in that order if there are several"
        )


def check_windows(model_options: Mapping[str, Any], parts: int) -> None:
    """Refuse windows over the cells of a latent of several parts, whose cells lie in one line.

    Raises:
        ValueError: A window would cut across the parts.
    """
    if parts > 1 and getattr(model_options.get("context_handler"), "dim", BATCH) != BATCH:
        raise ValueError(
            f"context windows: expected a latent of one part, found one of {parts} (a video with "
            "its sound, say), whose parts no window can cut together; take the context window node "
            "out, or sample the parts alone"
        )


def _code_stands_between(model_options: Mapping[str, Any]) -> bool:
    """Whether a custom node's code sees the network's inputs before the network does."""
    wrappers = model_options.get("transformer_options", {}).get("wrappers", {})
    between = any(any(wrappers.get(kind, ())) for kind in ("apply_model", "diffusion_model"))
    return between or model_options.get("model_function_wrapper") is not None


def check_widths(
    model: Any, conds: Mapping[str, Sequence[dict[str, Any]]], model_options: Mapping[str, Any]
) -> None:
    """Refuse inputs that were made with another model's text encoder.

    Nothing is checked where code of the run stands between the inputs and the network: it may
    make them fit.

    Args:
        model: A base model; `conditioning_widths()`, if it has it, gives the widths it takes.
        conds: Processed lists by name.
        model_options: Options of the run.

    Raises:
        ValueError: An input is wider or narrower than the model takes, or holds no tokens.
    """
    if _code_stands_between(model_options):
        return
    widths: dict[str, int] = getattr(model, "conditioning_widths", dict)()
    for name, entries in conds.items():
        for entry in entries:
            if TEXT in widths and TEXT not in entry["model_conds"]:
                raise ValueError(
                    f"the {name} conditioning holds no text, of which the model takes tokens of "
                    f"width {widths[TEXT]}; encode one with a CLIP Text Encode node, which may be "
                    "empty"
                )
            for key, wanted in widths.items():
                _check_width(entry["model_conds"].get(key), wanted, f"{name} conditioning", key)


def warn_of_broken_conditioning(conds: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Say which texts, pictures, references or masks of processed lists hold NaN or infinity.

    Args:
        conds: Processed lists by name.
    """
    for name, entries in conds.items():
        for entry in entries:
            for key, made in entry["model_conds"].items():
                what = "conditioning" if key == TEXT else f"conditioning ({key})"
                _warn_of_broken_tensors(getattr(made, "cond", None), f"{name} {what}")
            _warn_of_broken_tensors(entry.get("mask"), f"{name} conditioning's mask")


def _warn_of_broken_tensors(value: Any, where: str) -> None:
    for tensor in value if isinstance(value, (list, tuple)) else (value,):
        if torch.is_tensor(tensor) and tensor.is_floating_point():
            warn_if_not_finite(tensor, where)


def warn_of_unread_patches(model: Any, model_options: Mapping[str, Any]) -> None:
    """Say which patches of a run have no effect, because the network has no place for them.

    Nothing is said of networks that do not tell what they read, nor where a custom node's code
    stands between the run and the network.

    Args:
        model: A base model; `reads_patches` of its network holds the names in
            `transformer_options["patches"]` and `["patches_replace"]` that it looks at.
        model_options: Options of the run.
    """
    options = model_options.get("transformer_options", {})
    network = getattr(model, "diffusion_model", None)
    read: frozenset[str] | None = getattr(network, "reads_patches", None)
    if read is None or any(options.get("wrappers", {}).get("diffusion_model", {}).values()):
        return
    given = [
        name
        for table in ("patches", "patches_replace")
        for name, entries in (options.get(table) or {}).items()
        if entries
    ]
    unread = sorted({*given} - read)
    if unread:
        progress.warn(
            logger,
            "a node before the sampler has no effect on this kind of model: %s does not read the "
            "patches %s; it reads %s",
            type(network).__name__,
            ", ".join(unread),
            ", ".join(sorted(read)) or "none",
        )


def warn_of_unread_controls(
    model: Any, conds: Mapping[str, Sequence[dict[str, Any]]], model_options: Mapping[str, Any]
) -> None:
    """Say which control networks of a run have no effect, because the network that they are to
    control adds nothing where they have residuals.

    Nothing is said of networks that do not tell what they read, nor where a custom node's code
    stands between the run and the network.

    Args:
        model: A base model; `reads_control` of its network holds the parts whose residuals it adds.
        conds: Processed lists by name.
        model_options: Options of the run.
    """
    network = getattr(model, "diffusion_model", None)
    if not hasattr(network, "reads_patches") or _code_stands_between(model_options):
        return
    read: frozenset[str] = getattr(network, "reads_control", frozenset())
    entries = [entry for listed in conds.values() for entry in listed]
    links = {id(link): link for entry in entries for link in _chain(entry.get("control"))}
    for link in links.values():
        given = link.parts_given() if hasattr(link, "parts_given") else None
        if given is not None and not given & read:
            progress.warn(
                logger,
                "control_net: a %s has no effect on this kind of model: %s takes residuals for %s, "
                "this one gives some for %s; use one that was made for the model",
                type(link).__name__,
                type(network).__name__,
                ", ".join(sorted(read)) or "no part",
                ", ".join(sorted(given)),
            )


def _chain(control: Any) -> Iterator[Any]:
    """A control network and those before it."""
    while control is not None:
        yield control
        control = getattr(control, "previous_controlnet", None)


def _check_width(made: Any, wanted: int, whose: str, key: str) -> None:
    value = getattr(made, "cond", None)
    if not torch.is_tensor(value):
        return
    if key == TEXT and (value.ndim < 3 or 0 in value.shape):
        raise ValueError(
            f"the {whose} gives the model {key} of shape {tuple(value.shape)}, expected [batch, "
            f"tokens, {wanted}] with one token at least"
        )
    if value.shape[-1] != wanted:
        raise ValueError(
            f"the {whose} gives the model {key} of width {value.shape[-1]} (shape "
            f"{tuple(value.shape)}), but it takes {wanted}: the text was encoded for another kind "
            "of model; encode it with the CLIP of this model's checkpoint"
        )


def levels_of(sigmas: Any) -> Tensor:
    """The levels of a run as real numbers [steps + 1], in single or double precision.

    Args:
        sigmas: A tensor, a list or another sequence of numbers.

    Raises:
        TypeError: They are no numbers.
        ValueError: They have no axis, or more than one.
    """
    if not torch.is_tensor(sigmas):
        try:
            sigmas = torch.as_tensor(sigmas, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"sigmas are a tensor or a list of levels, found {type(sigmas).__name__} ({error})"
            ) from error
    if sigmas.ndim != 1:
        raise ValueError(f"sigmas are levels in a row, found a tensor of {tuple(sigmas.shape)}")
    # The square of a level, which mixing needs, can be beyond the numbers of half precision.
    return sigmas if sigmas.dtype in (torch.float32, torch.float64) else sigmas.float()


def check_sigmas(levels: Sequence[float]) -> None:
    """Refuse levels that no solver can follow.

    Raises:
        ValueError: A level is negative or not finite, the levels go down and up, or up from 0.
    """
    for place, sigma in enumerate(levels):
        if not 0 <= sigma < float("inf"):
            raise ValueError(f"sigma {place} is {sigma}: levels are finite and not negative")
    for place, (sigma, following) in enumerate(pairwise(levels)):
        if sigma == 0 and following > 0:
            raise ValueError(
                f"sigma {place} is 0 and sigma {place + 1} is {following:g}: a clean latent has no "
                "noise to follow; start above 0, as FlipSigmas does, or add noise first"
            )
    falls = any(following < sigma for sigma, following in pairwise(levels))
    rise = first_rise(levels)
    if falls and rise is not None:
        raise ValueError(
            _rise_message(levels, rise) + "levels go one way; sort them so that all fall, or let "
            "all rise, as FlipSigmas does"
        )


def check_descending(levels: Sequence[float]) -> None:
    """Refuse levels that rise: fresh noise cannot take any away.

    Raises:
        ValueError: A level is above the one before it.
    """
    rise = first_rise(levels)
    if rise is not None:
        raise ValueError(
            _rise_message(levels, rise)
            + "a sampler that adds noise only goes down; use one without noise for flipped sigmas"
        )


def first_rise(levels: Sequence[float]) -> int | None:
    """Place of the first level that is above the one before it."""
    for place, (sigma, following) in enumerate(pairwise(levels), start=1):
        if following > sigma:
            return place
    return None


def _rise_message(levels: Sequence[float], place: int) -> str:
    return f"sigmas rise from {levels[place - 1]:g} to {levels[place]:g} at step {place}: "


def warn_if_not_finite(latent: Tensor, where: str) -> None:
    """Say in the log when a latent holds NaN or infinity, and what usually causes it."""
    if not bool(torch.isfinite(latent).all()):
        share = 100 * float((~torch.isfinite(latent)).float().mean())
        progress.warn(
            logger,
            "%.3g %% of the %s is NaN or infinite: usually a half-precision overflow of the model "
            "(try a higher precision) or a broken LoRA or checkpoint",
            share,
            where,
        )
