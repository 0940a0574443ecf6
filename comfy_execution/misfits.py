"""What an input was given that is not of the kind its type promises.

Types on links are names only: whatever a node returns reaches the next one. A node that fails over
a picture without colours or a mask of one axis says so in the words of its mathematics; here those
are put into words about the input. Values are looked at by their attributes: no torch here.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

LEAST_LATENT_AXES, MOST_LATENT_AXES, LEAST_MASK_AXES = 3, 5, 2
PICTURE_CHANNELS = (1, 3, 4)  # grey, colours, colours with their alpha


def misfit(declared: Any, value: Any) -> str | None:
    """Says what a value lacks to be of a declared type.

    Args:
        declared: Type of the input, several joined by commas, or a list of options.
        value: What arrived there.

    Returns:
        "expected ..., found ..."; None if the value is of the type, or nothing is known of that.
    """
    if not isinstance(declared, str):
        return None
    reasons = []
    for name in declared.split(","):
        check = CHECKS.get(name.strip())
        reason = check(value) if check is not None else None
        if reason is None:
            return None
        reasons.append(reason)
    return f"expected {' or '.join(reasons)}, found {described(value)}"


def described(value: Any) -> str:
    """A value in a few words: tensors by shape and type, containers by what is in them."""
    if value is None:
        return "none"
    if (shape := shape_of(value)) is not None:
        return f"a tensor of shape {shape} and type {getattr(value, 'dtype', 'unknown')}"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{name!r}: {_brief(item)}" for name, item in list(value.items())[:5])
        return f"a dictionary {{{inside}}}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_brief(item) for item in value[:3])
        return f"a {type(value).__name__} of {len(value)}" + (f" ({inside})" if value else "")
    if isinstance(value, str):
        return f"the text {value!r:.60}"
    if isinstance(value, (int, float)):
        return f"{value}" if isinstance(value, bool) else f"the number {value!r:.60}"
    return f"an object of class {type(value).__name__}"


def _brief(value: Any) -> str:
    shape = shape_of(value)
    return f"tensor {shape}" if shape is not None else type(value).__name__


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Shape of a tensor or array, None for everything else."""
    shape = getattr(value, "shape", None)
    return tuple(shape) if isinstance(shape, tuple) else None


def is_own_refusal(error: BaseException) -> bool:
    """Whether the last frame is a `raise` of the node's own code, not of a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or "site-packages" in frames[-1].filename:
        return False
    return (frames[-1].line or "").lstrip().startswith("raise")


# --- the kinds: each returns what it expects of a value that is of another kind -------------------


def _tensor(
    words: str, least: int, most: int, has_right_channels: Callable[[int], bool] = bool
) -> Callable[[Any], str | None]:
    """A tensor of floating-point numbers, with so many axes and the right length of the last."""

    def check(value: Any) -> str | None:
        shape = shape_of(value)
        if shape is None or not least <= len(shape) <= most or not _is_floating(value):
            return words
        return None if has_right_channels(shape[-1]) and 0 not in shape else words

    return check


def _is_floating(value: Any) -> bool:
    return "float" in str(getattr(value, "dtype", "float"))


def _latent(value: Any) -> str | None:
    samples = value.get("samples") if isinstance(value, Mapping) else None
    shape = shape_of(samples)
    if (
        shape is not None
        and LEAST_LATENT_AXES <= len(shape) <= MOST_LATENT_AXES
        and 0 not in shape
        and _is_floating(samples)
    ):
        mask = shape_of(value.get("noise_mask"))
        if mask is None or (len(mask) >= LEAST_MASK_AXES and 0 not in mask):
            return None
        return "a latent whose 'noise_mask' has rows and columns: [batch, height, width]"
    return (
        "a latent: a dictionary whose 'samples' are [batch, channels, height, width] (videos have "
        "an axis of time before height, sounds a single one)"
    )


def _conditioning(value: Any) -> str | None:
    if isinstance(value, list) and all(
        isinstance(entry, (list, tuple))
        and len(entry) == 2
        and isinstance(entry[1], Mapping)
        and _embeds(entry[0])
        for entry in value
    ):
        return None
    return "conditioning: a list of [embeddings [batch, tokens, width], options]"


def _embeds(value: Any) -> bool:
    shape = shape_of(value)
    return shape is not None and len(shape) == 3 and 0 not in shape


def _sound(value: Any) -> str | None:
    if isinstance(value, Mapping):
        shape, rate = shape_of(value.get("waveform")), value.get("sample_rate")
        if (
            shape is not None
            and len(shape) == 3
            and 0 not in shape
            and isinstance(rate, (int, float))
        ):
            return None
    return "a sound: a dictionary of 'waveform' [batch, channels, samples] and 'sample_rate'"


def _numbers(words: str, count: int | None = None) -> Callable[[Any], str | None]:
    """A list of numbers, of one length if that is given."""

    def check(value: Any) -> str | None:
        is_list = isinstance(value, (list, tuple)) and all(_is_number(item) for item in value)
        return None if is_list and (count is None or len(value) == count) else words

    return check


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _plain(words: str, kind: type | tuple[type, ...]) -> Callable[[Any], str | None]:
    return lambda value: None if isinstance(value, kind) else words


def _tracks(value: Any) -> str | None:
    if isinstance(value, Mapping):
        shape = shape_of(value.get("track_path"))
        if shape is not None and len(shape) == 3 and 0 not in shape:
            return None
    return "tracks: a dictionary whose 'track_path' is [frames, tracks, 2]"


def _object(words: str) -> Callable[[Any], str | None]:
    """Something with methods: neither a number or text, nor a tensor or container of such."""

    def check(value: Any) -> str | None:
        is_data = isinstance(value, (str, int, float, list, tuple, Mapping))
        return words if value is None or is_data or shape_of(value) is not None else None

    return check


CHECKS: dict[str, Callable[[Any], str | None]] = {
    "IMAGE": _tensor(
        "pictures [batch, height, width, channels] of 1, 3 or 4 channels", 4, 4,
        PICTURE_CHANNELS.__contains__,
    ),
    "MASK": _tensor("masks [batch, height, width]", 3, 3),
    "LATENT": _latent,
    "CONDITIONING": _conditioning,
    "SIGMAS": _tensor("noise levels [steps + 1]", 1, 1),
    "AUDIO": _sound,
    "TRACKS": _tracks,
    "WAN_CAMERA_EMBEDDING": _tensor("a camera path [1, channels, frames, height, width]", 5, 5),
    "TIMESTEPS_RANGE": _numbers("a range: two shares of the run", 2),
    "FLOATS": _numbers("a list of numbers"),
    "INT": _plain("a whole number", int),
    "FLOAT": _plain("a number", (int, float)),
    "STRING": _plain("text", str),
    "MODEL": _object("a model"),
    "CLIP": _object("text encoders"),
    "VAE": _object("an autoencoder"),
    "CLIP_VISION": _object("an image encoder"),
    "CONTROL_NET": _object("a control network"),
    "STYLE_MODEL": _object("a style model"),
    "UPSCALE_MODEL": _object("an upscaler"),
    "GUIDER": _object("a guider"),
    "NOISE": _object("a source of noise"),
    "SAMPLER": _object("a sampler"),
    "HOOKS": _object("hooks"),
    "HOOK_KEYFRAMES": _object("keyframes of hooks"),
    "CLIP_VISION_OUTPUT": _object("what an image encoder saw"),
    "LATENT_OPERATION": _object("an operation on latents"),
    "VIDEO": _object("a video"),
}  # fmt: skip
"""Type name -> what it expects, said of a value that is not of it; None of one that is."""
