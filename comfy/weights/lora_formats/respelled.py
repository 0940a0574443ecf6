"""Names of a LoRA file that are known ones under another prefix, or in another library's words.

Trainers write one network's names in many wrappings: `diffusion_model.`, `transformer.`,
`lora_unet_`, `base_model.model.`, or none, with dots or underscores. The layouts list what the
reference server reads; what they leave unread is looked up here by the name inside the wrapping.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from comfy.weights.diffusers_transformers import swap_scale_shift
from comfy.weights.lora_formats.encoder_words import EncoderNames
from comfy.weights.lora_formats.library_words import WORDS
from comfy.weights.lora_formats.unet import NETWORK

WRAPPINGS = re.compile(
    r"^(?:base_model\.model\.|model\.|module\.|_orig_mod\.|pipe\.|dit\.|net\.|diffusion_model\.|"
    r"unet\.|transformer\.|(?:lora|oft)_unet_+|lycoris_|lora_transformer_|lora_prior_unet_)"
)
"""One prefix of those that trainers put before a network's own names."""


class Meaning(NamedTuple):
    """What a name of a file stands for.

    Attributes:
        target: A weight, or a slice of one.
        part: Which part of it, as marked in `library_words`; empty for all of it.
    """

    target: Any
    part: str = ""

    def place(self, target: Any, rows: int | None) -> Any:
        """The target, or what its change leads to (a bias beside it), cut down to the part.

        Args:
            target: Key, or key with offset and function.
            rows: How many rows the change has; None where nobody knows.
        Returns:
            None where it is not known which part of a weight is meant.
        """
        if not self.part or not isinstance(target, str):
            return target
        if self.part == "swap":
            return (target, None, swap_scale_shift)
        return (target, (0, int(self.part) * rows, rows)) if rows else None


def bare(name: str) -> str:
    """A network's name without wrappings, underscored."""
    while True:
        inner = WRAPPINGS.sub("", name)
        if inner == name:
            return name.replace(".", "_")
        name = inner


def respelled(unread: Iterable[str], known: Mapping[str, Any]) -> dict[str, Meaning]:
    """Prefixes of unread file keys -> what they mean.

    Args:
        unread: Keys of the file no layout has a name for.
        known: File key -> target, as the layouts give it.
    """
    targets: dict[str, Any] = {}
    for name, target in known.items():
        key = target if isinstance(target, str) else target[0]
        if key.startswith(NETWORK):
            same = targets.setdefault(bare(name), target)
            if same != target:  # two weights would have the name
                targets[bare(name)] = None
    encoders = EncoderNames(known)
    found: dict[str, Meaning] = {}
    for key in unread:
        for stem in _stems(key):
            name = f"{stem}.modulation" if key == f"{stem}.diff_m" else stem
            meaning = _network_meaning(name, targets) or _encoder_meaning(name, encoders)
            if meaning is not None:
                found[stem] = meaning
                break
    return found


def _network_meaning(stem: str, targets: Mapping[str, Any]) -> Meaning | None:
    for name in _in_our_words(bare(stem), targets):
        ours, _, part = name.partition("@")
        target = targets.get(ours)
        if target is not None:
            return Meaning(target, part)
    return None


def _encoder_meaning(stem: str, encoders: EncoderNames) -> Meaning | None:
    target = encoders.find(stem)
    return None if target is None else Meaning(target)


def _stems(key: str) -> Iterator[str]:
    """What may be the name before the adapter's own words, longest first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key
        if key.endswith("_lora"):
            yield key.removesuffix("_lora")


def _in_our_words(name: str, targets: Mapping[str, Any]) -> Iterator[str]:
    yield name
    for of_family, rules in WORDS:
        if of_family in targets:
            said = name
            for pattern, words in rules:
                said = re.sub(pattern, words, said)
            yield said
