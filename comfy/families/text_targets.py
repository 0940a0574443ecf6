"""Which classes use text encoders that come in files of their own: by the encoders, and by the
family that the person names.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch

from comfy.families.family import ClipTarget
from comfy.text_encoders import (
    ace,
    ace15,
    hunyuan_image,
    hunyuan_video,
    hydit,
    jina_clip_2,
    lt,
    lumina2,
    mistral,
    newbie,
    ovis,
    pile_t5,
    qwen,
    qwen3_vl,
    qwen35,
    t5_alone,
    umt5,
)
from comfy.text_encoders.flux import FluxTokenizer, flux_clip
from comfy.text_encoders.hidream import PARTS as HIDREAM_PARTS
from comfy.text_encoders.hidream import HiDreamTokenizer, hidream_clip
from comfy.text_encoders.kandinsky5 import (
    Kandinsky5Tokenizer,
    Kandinsky5TokenizerImage,
    kandinsky5_clip,
)
from comfy.text_encoders.omnigen2 import NAME as QWEN25_3B
from comfy.text_encoders.omnigen2 import Omnigen2Tokenizer, omnigen2_clip
from comfy.text_encoders.sd1 import SD1ClipModel, SD1Tokenizer
from comfy.text_encoders.sd2 import SD2ClipModel, SD2Tokenizer
from comfy.text_encoders.sd3 import SD3Tokenizer, sd3_clip
from comfy.text_encoders.sdxl import (
    SDXLClipModel,
    SDXLRefinerClipModel,
    SDXLTokenizer,
    StableCascadeClipModel,
    StableCascadeTokenizer,
)


class CLIPType(enum.Enum):
    """What a text encoder is loaded for."""

    STABLE_DIFFUSION = 1
    STABLE_CASCADE = 2
    SD3 = 3
    STABLE_AUDIO = 4
    HUNYUAN_DIT = 5
    FLUX = 6
    MOCHI = 7
    LTXV = 8
    HUNYUAN_VIDEO = 9
    PIXART = 10
    COSMOS = 11
    LUMINA2 = 12
    WAN = 13
    HIDREAM = 14
    CHROMA = 15
    ACE = 16
    OMNIGEN2 = 17
    QWEN_IMAGE = 18
    HUNYUAN_IMAGE = 19
    HUNYUAN_VIDEO_15 = 20
    OVIS = 21
    KANDINSKY5 = 22
    KANDINSKY5_IMAGE = 23
    NEWBIE = 24
    FLUX2 = 25


Kept = torch.dtype | None  # type in which the weights of a large encoder stay
Target = Callable[[Kept], ClipTarget]

OLD_XXL = "t5xxl_old"  # its keys and tokens are those of T5 XXL


def _plain(tokenizer: Callable[..., object], clip: Callable[..., torch.nn.Module]) -> Target:
    """Classes that keep no weights in a type of their own."""
    return lambda kept: ClipTarget(tokenizer, clip)  # noqa: ARG005 - as all rows take it


def _t5(arrangement: t5_alone.Arrangement) -> Target:
    """A T5 that is the only encoder."""
    return lambda kept: ClipTarget(
        t5_alone.t5_alone_tokenizer(arrangement), t5_alone.t5_alone_clip(arrangement, kept)
    )


def _ace15(writer: str | None) -> Target:
    """ACE-Step 1.5 beside a language model of this name; None: without one."""
    return lambda kept: ClipTarget(ace15.ace15_tokenizer(writer), ace15.ace15_clip(writer, kept))


QWEN_AND_BYT5 = frozenset({qwen.QWEN25_7B, hunyuan_image.BYT5})
# Encoder -> classes that use it alone, for every type without a row of its own.
ALONE: dict[str, Target] = {
    "clip_l": _plain(SD1Tokenizer, SD1ClipModel),
    "clip_h": _plain(SD2Tokenizer, SD2ClipModel),
    "clip_g": _plain(SDXLTokenizer, SDXLRefinerClipModel),
    "t5xxl": _t5(t5_alone.MOCHI),
    OLD_XXL: _t5(t5_alone.COSMOS),
    t5_alone.BASE: _t5(t5_alone.STABLE_AUDIO),
    pile_t5.NAME: _t5(pile_t5.AURAFLOW),
    umt5.NAME: lambda kept: ClipTarget(umt5.WanT5Tokenizer, umt5.wan_clip(kept)),
    ace.NAME: lambda kept: ClipTarget(ace.AceT5Tokenizer, ace.ace_clip(kept)),
    qwen.QWEN25_7B: lambda kept: ClipTarget(
        qwen.QwenImageTokenizer, qwen.qwen_clip(qwen.QwenImageTEModel, kept)
    ),
    qwen.QWEN3_4B: lambda kept: ClipTarget(
        qwen.ZImageTokenizer, qwen.qwen_clip(qwen.ZImageTEModel, kept)
    ),
    ace15.SMALL: lambda kept: ClipTarget(
        ace15.SmallTokenizer, qwen.qwen_clip(ace15.SmallAlone, kept)
    ),
    QWEN25_3B: lambda kept: ClipTarget(Omnigen2Tokenizer, omnigen2_clip(kept)),
    qwen3_vl.NAME: lambda kept: ClipTarget(qwen3_vl.Qwen3VLTokenizer, qwen3_vl.te(kept)),
    qwen35.NAME: lambda kept: ClipTarget(qwen35.Qwen35Tokenizer, qwen35.te(kept)),
    ovis.NAME: lambda kept: ClipTarget(ovis.OvisTokenizer, ovis.te(kept)),
    lumina2.GEMMA2_2B: lambda kept: ClipTarget(lumina2.LuminaTokenizer, lumina2.te(kept)),
    lumina2.GEMMA3_4B: lambda kept: ClipTarget(
        lumina2.NTokenizer, lumina2.te(kept, lumina2.GEMMA3_4B)
    ),
    hunyuan_video.NAME: lambda kept: ClipTarget(
        HiDreamTokenizer, hidream_clip([hunyuan_video.NAME], kept)
    ),
    jina_clip_2.NAME: _plain(
        jina_clip_2.JinaClip2TokenizerWrapper, jina_clip_2.JinaClip2TextModelWrapper
    ),
    mistral.NAME: lambda kept: ClipTarget(mistral.Flux2Tokenizer, mistral.flux2_clip(kept)),
}
# Type and encoders -> classes that use them together, or one as no other type does. None: this
# type cannot do with these.
FOR_TYPE: dict[tuple[CLIPType, frozenset[str]], Target | None] = {
    (CLIPType.STABLE_CASCADE, frozenset({"clip_g"})): _plain(
        StableCascadeTokenizer, StableCascadeClipModel
    ),
    (CLIPType.FLUX, frozenset({"clip_l", "t5xxl"})): lambda kept: ClipTarget(
        FluxTokenizer, flux_clip(kept)
    ),
    (CLIPType.LTXV, frozenset({"t5xxl"})): _t5(t5_alone.LTXV),
    (CLIPType.LTXV, frozenset({lt.GEMMA3_12B, lt.CONNECTORS})): lambda kept: ClipTarget(
        lt.LTXAVGemmaTokenizer, lt.ltxav_te(kept)
    ),
    (CLIPType.PIXART, frozenset({"t5xxl"})): _t5(t5_alone.PIXART),
    (CLIPType.CHROMA, frozenset({"t5xxl"})): _t5(t5_alone.PIXART),
    (CLIPType.WAN, frozenset({"t5xxl"})): None,
    (CLIPType.HUNYUAN_DIT, frozenset({hydit.BERT, hydit.MT5})): _plain(
        hydit.HyditTokenizer, hydit.HyditModel
    ),
    (CLIPType.HUNYUAN_VIDEO, frozenset({"clip_l", hunyuan_video.NAME})): lambda kept: ClipTarget(
        hunyuan_video.HunyuanVideoTokenizer, hunyuan_video.hunyuan_video_clip(kept)
    ),
    (CLIPType.NEWBIE, frozenset({lumina2.GEMMA3_4B, jina_clip_2.NAME})): lambda kept: ClipTarget(
        newbie.NewBieTokenizer, newbie.newbie_clip(kept)
    ),
    (CLIPType.ACE, frozenset({ace15.SMALL})): _ace15(None),
    (CLIPType.ACE, frozenset({ace15.SMALL, ovis.NAME})): _ace15(ovis.NAME),
    (CLIPType.ACE, frozenset({ace15.SMALL, qwen.QWEN3_4B})): _ace15(qwen.QWEN3_4B),
    (CLIPType.KANDINSKY5, frozenset({"clip_l", qwen.QWEN25_7B})): lambda kept: ClipTarget(
        Kandinsky5Tokenizer, kandinsky5_clip(kept)
    ),
    (CLIPType.KANDINSKY5_IMAGE, frozenset({"clip_l", qwen.QWEN25_7B})): lambda kept: ClipTarget(
        Kandinsky5TokenizerImage, kandinsky5_clip(kept)
    ),
    (CLIPType.HUNYUAN_IMAGE, frozenset({qwen.QWEN25_7B})): lambda kept: ClipTarget(
        hunyuan_image.HunyuanImageTokenizer, hunyuan_image.hunyuan_image_clip(False, kept)
    ),
    (CLIPType.HUNYUAN_IMAGE, QWEN_AND_BYT5): lambda kept: ClipTarget(
        hunyuan_image.HunyuanImageTokenizer, hunyuan_image.hunyuan_image_clip(True, kept)
    ),
    (CLIPType.HUNYUAN_VIDEO_15, QWEN_AND_BYT5): lambda kept: ClipTarget(
        hunyuan_image.HunyuanVideo15Tokenizer, hunyuan_image.hunyuan_image_clip(True, kept)
    ),
}
# The encoders that Stable Diffusion 3 uses, in any number, in the order of the arguments.
SD3_PARTS = ("clip_l", "clip_g", "t5xxl")
# Two files are the two encoders of SDXL for every type without an arrangement of its own.
PAIR = frozenset({"clip_l", "clip_g"})
PAIR_TARGET = ClipTarget(SDXLTokenizer, SDXLClipModel)
OWN_ARRANGEMENT = frozenset(
    {
        CLIPType.SD3,
        CLIPType.FLUX,
        CLIPType.HIDREAM,
        CLIPType.HUNYUAN_DIT,
        CLIPType.HUNYUAN_VIDEO,
        CLIPType.HUNYUAN_IMAGE,
        CLIPType.HUNYUAN_VIDEO_15,
        CLIPType.KANDINSKY5,
        CLIPType.KANDINSKY5_IMAGE,
        CLIPType.NEWBIE,
        CLIPType.LTXV,
    }
)


def text_target(
    kinds: Sequence[str | None], clip_type: CLIPType, kept: torch.dtype | None = None
) -> ClipTarget:
    """The classes that use these encoders for this family.

    Args:
        kinds: Names of the encoders.
        kept: The type in which the weights of a large one stay.

    Raises:
        ValueError: No family that can be loaded uses them together.
    """
    names = [str(kind) for kind in kinds]
    together = frozenset(names)
    if len(together) == len(names):
        if clip_type is CLIPType.SD3 and together <= set(SD3_PARTS):
            clip_l, clip_g, t5 = (name in together for name in SD3_PARTS)
            return ClipTarget(SD3Tokenizer, sd3_clip(clip_l, clip_g, t5, kept))
        if clip_type is CLIPType.HIDREAM and together <= set(HIDREAM_PARTS):
            return ClipTarget(HiDreamTokenizer, hidream_clip(names, kept))
        alone = ALONE.get(names[0]) if len(names) == 1 else None
        found = FOR_TYPE.get((clip_type, together), alone)
        if found is not None:
            return found(kept)
        if together == PAIR and clip_type not in OWN_ARRANGEMENT:
            return PAIR_TARGET
    raise ValueError(
        f"text encoders {', '.join(names)} for type {clip_type.name.lower()} cannot be loaded; "
        f"known: {known_in_words()}"
    )


def known_in_words() -> str:
    """All arrangements, for messages."""
    pairs = [
        f"{' with '.join(sorted(names))} for type {kind.name.lower()}"
        for (kind, names), row in FOR_TYPE.items()
        if row is not None and len(names) > 1
    ]
    rest = [
        "clip_l with clip_g for SDXL",
        "clip_l, clip_g, t5xxl or some for type sd3",
        "clip_l, clip_g, t5xxl, llama or some for type hidream",
    ]
    return "; ".join([f"one of {', '.join(ALONE)}", *rest, *pairs])
