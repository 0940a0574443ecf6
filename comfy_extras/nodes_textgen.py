"""Nodes that let a language model, loaded as a text encoder, write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from comfy_api.latest import io
from comfy_extras.declarations import text_input
from comfy_extras.extension import entrypoint_of

MOST_WORDS = 32768
FRAMES_A_SECOND = 24  # of what the input video is taken for; one frame a second is looked at
THOUGHT, THOUGHT_END = "<think>", "</think>"
DRAFTS = ("auto", "off", "2", "3", "4", "5")
TREES = ("tree2s1", "tree2s2", "tree3s1", "tree4s1m8")


def sampling_input() -> io.DynamicCombo.Input:
    """Whether chance has a part in the choice of words, and how."""
    return io.DynamicCombo.Input(
        "sampling_mode",
        options=[
            io.DynamicCombo.Option("on", sampling_inputs()),
            io.DynamicCombo.Option("off", []),
        ],
    )


def sampling_inputs() -> list[io.Input]:
    """How chance chooses words."""
    return [
        io.Float.Input(
            "temperature", default=0.7, min=0.01, max=2.0, step=0.01,
            tooltip="Below 1 likely words become likelier.",
        ),
        io.Int.Input(
            "top_k", default=64, min=0, max=1000,
            tooltip="Only so many of the likeliest words; 0 for all.",
        ),
        io.Float.Input(
            "top_p", default=0.95, min=0.0, max=1.0, step=0.01,
            tooltip="Only the likeliest words that together have this probability.",
        ),
        io.Float.Input(
            "min_p", default=0.05, min=0.0, max=1.0, step=0.01,
            tooltip="Only words with this part of the likeliest one's probability.",
        ),
        io.Float.Input(
            "repetition_penalty", default=1.05, min=0.0, max=5.0, step=0.01,
            tooltip="Above 1 words that were written already become unlikelier.",
        ),
        io.Int.Input("seed", default=0, min=0, max=2**64 - 1),
        io.Float.Input(
            "presence_penalty", default=0.0, min=0.0, max=5.0, step=0.01, optional=True,
            tooltip="Taken from the score of every word that was written already.",
        ),
    ]  # fmt: skip


def writing_inputs(drafts: tuple[str, ...]) -> list[io.Input]:
    """Inputs that both nodes have."""
    return [
        io.Clip.Input("clip"),
        text_input("prompt"),
        io.Image.Input("image", optional=True),
        io.Image.Input(
            "video", optional=True,
            tooltip="Frames, 24 for a second; one of each second is looked at.",
        ),
        io.Audio.Input("audio", optional=True),
        io.Int.Input(
            "max_length", default=512, min=1, max=MOST_WORDS,
            tooltip="How many tokens are written at most.",
        ),
        sampling_input(),
        io.Boolean.Input(
            "thinking", default=False, optional=True,
            tooltip="Let the model think before it answers, if it knows how.",
        ),
        io.Boolean.Input(
            "use_default_template", default=True, optional=True, advanced=True,
            tooltip="Put the prompt into the model's conversation; off: continue it as it is.",
        ),
        io.Combo.Input(
            "mtp", options=list(drafts), default="auto", optional=True, advanced=True,
            tooltip="For files with weights that draft several words at once; here without effect.",
        ),
        io.String.Input(
            "system_prompt", default="", optional=True, force_input=True,
            tooltip="Instructions in place of the model's usual ones.",
        ),
    ]  # fmt: skip


def text_outputs() -> list[io.Output]:
    """The answer, and the thoughts before it."""
    return [
        io.String.Output(display_name="generated_text"),
        io.String.Output(display_name="thinking"),
    ]


@dataclass(frozen=True)
class Seen:
    """What a model looks at and listens to beside the text."""

    image: Tensor | None = None
    video: Tensor | None = None
    audio: dict[str, Any] | None = None

    def pictures(self) -> list[Tensor]:
        """Pictures ``[1, H, W, C]``: those of the batch, then a frame of each second.

        Raises:
            ValueError: There is sound.
        """
        if self.audio is not None:
            raise ValueError(
                "audio: none of the language models that can be loaded here listens to sound; "
                "leave audio unconnected"
            )
        batches = [self.image] if self.image is not None else []
        if self.video is not None:
            batches.append(self.video[::FRAMES_A_SECOND])
        return [one for batch in batches for one in batch.split(1)]


def sampling_options(mode: dict[str, Any]) -> dict[str, Any]:
    """Options of `CLIP.generate` for what was chosen."""
    if mode["sampling_mode"] == "off":
        return {"do_sample": False}
    return {"do_sample": True, **{k: v for k, v in mode.items() if k != "sampling_mode"}}


def parted(text: str, prompt: str, thinks: bool = False) -> tuple[str, str]:
    """Answer and thoughts; these stand first, in a block that the prompt, or the conversation of a
    model that was let think, may have opened.
    """
    opened = text.lstrip().startswith(THOUGHT)
    was_open = prompt.rstrip().endswith(THOUGHT) or (thinks and THOUGHT_END in text)
    if not opened and not was_open:
        return text, ""
    inside = text.lstrip().removeprefix(THOUGHT) if opened else text
    thoughts, _, answer = inside.partition(THOUGHT_END)
    return answer.strip(), thoughts.strip()


VIDEO_FROM_TEXT = """\
You turn a short idea into the description from which a model makes one video shot with sound.
Answer with the description alone: a single paragraph in English, in the present tense, of about
150 to 250 words. No title, no list, no remark about your work.
Keep everything that the idea says: people, things, words that are spoken, names, style. Where it
is silent, add only what fits it.
Tell what is seen and heard in the order in which it happens: first the kind of picture and the
place with its light, then who or what is there and how it looks, then each movement and its
consequence, with words of time between them. Show feelings by faces, hands and voices instead of
naming them. Say how the camera moves and what it shows then, or that it stands still.
Let sounds belong to what makes them: steps, weather, machines, music. Spoken words stand in
quotation marks, with who says them, how, and in which language; nobody speaks unless the idea has
it so. One continuous shot: no cuts, no captions, no logos unless they are asked for."""
VIDEO_FROM_IMAGE = f"""\
{VIDEO_FROM_TEXT}
You see the first frame of the video. Begin from it: what is visible there is known, so name it in
a few words and do not change or contradict it. Spend the description on what happens next:
movements, the camera, sounds. If the idea and the frame disagree, let the video lead from the
frame to the idea."""


def answered(clip: Any, prompt: str, is_whole: bool, length: int, mode: Any, **asked: Any) -> Any:
    """Answer and thoughts of the language model in `clip`.

    Args:
        is_whole: The prompt is a text to continue, not a question.
        asked: Options of `CLIP.tokenize`.
    """
    tokens = clip.tokenize(prompt, skip_template=is_whole, **asked)
    ids = clip.generate(tokens, max_length=length, **sampling_options(mode))
    thinks = bool(asked.get("thinking")) and not is_whole
    return parted(clip.decode(ids), prompt if is_whole else "", thinks)


class TextGenerate(io.ComfyNode):
    """Answers a question, or continues a text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TextGenerate",
            display_name="Generate Text",
            category="textgen",
            description="Lets a language model, loaded as a text encoder, answer a prompt.",
            search_aliases=["llm", "prompt enhancer", "caption"],
            inputs=writing_inputs((*DRAFTS, *TREES)),
            outputs=text_outputs(),
        )

    @classmethod
    def execute(
        cls,
        clip: Any,
        prompt: str,
        max_length: int,
        sampling_mode: dict[str, Any],
        image: Tensor | None = None,
        video: Tensor | None = None,
        audio: dict[str, Any] | None = None,
        thinking: bool = False,
        use_default_template: bool = True,
        mtp: str = "auto",  # noqa: ARG003 - no file that can be loaded here has such weights
        system_prompt: str = "",
    ) -> io.NodeOutput:
        made = answered(
            clip,
            prompt,
            not use_default_template,
            max_length,
            sampling_mode,
            images=Seen(image, video, audio).pictures(),
            thinking=thinking,
            system_prompt=system_prompt,
        )
        return io.NodeOutput(*made)


class TextGenerateLTX2Prompt(io.ComfyNode):
    """Tells a short idea as LTX-2 wants to read it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TextGenerateLTX2Prompt",
            display_name="Generate LTX2 Prompt",
            category="textgen",
            description="Turns an idea, and a first frame, into a description of video and sound.",
            search_aliases=["llm", "prompt enhancer"],
            inputs=writing_inputs(DRAFTS),
            outputs=text_outputs(),
        )

    @classmethod
    def execute(
        cls,
        clip: Any,
        prompt: str,
        max_length: int,
        sampling_mode: dict[str, Any],
        image: Tensor | None = None,
        video: Tensor | None = None,
        audio: dict[str, Any] | None = None,
        thinking: bool = False,
        use_default_template: bool = True,
        mtp: str = "auto",  # noqa: ARG003 - no file that can be loaded here has such weights
        system_prompt: str = "",
    ) -> io.NodeOutput:
        usual = VIDEO_FROM_TEXT if image is None else VIDEO_FROM_IMAGE
        text, thoughts = answered(
            clip,
            prompt,
            not use_default_template,
            max_length,
            sampling_mode,
            images=Seen(image, video, audio).pictures(),
            thinking=thinking,
            system_prompt=system_prompt or usual,
        )
        return io.NodeOutput(text if text.strip() else prompt, thoughts)


comfy_entrypoint = entrypoint_of(TextGenerate, TextGenerateLTX2Prompt)
