"""Nodes that write text: what they declare, how they part thoughts from answers, what they ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_extras import nodes_textgen
from comfy_extras.nodes_textgen import TextGenerate, TextGenerateLTX2Prompt, parted

ON = {
    "sampling_mode": "on", "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
    "repetition_penalty": 1.2, "seed": 9,
}  # fmt: skip


class Writer:
    """A CLIP that notes what it is asked and answers with a text."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.asked: dict[str, Any] = {}

    def tokenize(self, text: str, **options: Any) -> dict[str, Any]:
        self.asked = {"text": text, **options}
        return {"words": [[(1, 1.0)]]}

    def generate(self, tokens: dict[str, Any], **options: Any) -> list[int]:
        assert tokens == {"words": [[(1, 1.0)]]}
        self.asked.update(options)
        return [1]

    def decode(self, ids: list[int]) -> str:
        assert ids == [1]
        return self.answer


def test_the_node_has_the_published_inputs() -> None:
    info = TextGenerate.GET_NODE_INFO_V1()
    required, optional = info["input"]["required"], info["input"]["optional"]
    assert list(required) == ["clip", "prompt", "max_length", "sampling_mode"]
    assert list(optional) == [
        "image", "video", "audio", "thinking", "use_default_template", "mtp", "system_prompt",
    ]  # fmt: skip
    on, off = required["sampling_mode"][1]["options"]
    assert (on["key"], off["key"]) == ("on", "off")
    sampling = {**on["inputs"]["required"], **on["inputs"]["optional"]}
    assert {name: entry[1]["default"] for name, entry in sampling.items()} == {
        "temperature": 0.7, "top_k": 64, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05,
        "seed": 0, "presence_penalty": 0.0,
    }  # fmt: skip
    assert off["inputs"] == {"required": {}}
    assert info["output"] == ["STRING", "STRING"]
    assert info["output_name"] == ["generated_text", "thinking"]
    assert required["max_length"][1]["max"] == 32768


def test_what_is_set_reaches_the_model() -> None:
    writer = Writer("Hello")
    image, video = torch.zeros(2, 8, 8, 3), torch.rand(49, 8, 8, 3)
    made = TextGenerate.execute(
        writer, "Why?", 77, ON, image=image, video=video, thinking=True, system_prompt="Be kind."
    )
    assert made.args == ("Hello", "")
    pictures = writer.asked.pop("images")
    assert [tuple(one.shape) for one in pictures] == [(1, 8, 8, 3)] * 5
    assert torch.equal(torch.cat(pictures[2:]), video[[0, 24, 48]])
    assert writer.asked == {
        "text": "Why?", "thinking": True, "skip_template": False, "system_prompt": "Be kind.",
        "max_length": 77, "do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.9,
        "min_p": 0.1, "repetition_penalty": 1.2, "seed": 9,
    }  # fmt: skip
    TextGenerate.execute(writer, "Why?", 5, {"sampling_mode": "off"})
    assert writer.asked["do_sample"] is False
    assert "seed" not in writer.asked


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", "Why?", ("Yes.", "Hm.")),
        ("  <think>Hm", "", ("", "Hm")),
        ("Hm.</think> Yes.", "Why?\n<think>\n", ("Yes.", "Hm.")),
        (" Yes <think>no</think>", "Why?", (" Yes <think>no</think>", "")),
        ("Hm.</think> Yes.", "Why?", ("Hm.</think> Yes.", "")),
        ("", "", ("", "")),
    ],
)
def test_thoughts_are_told_apart(text: str, prompt: str, expected: tuple[str, str]) -> None:
    assert parted(text, prompt) == expected


def test_thoughts_that_the_conversation_opened_are_told_apart() -> None:
    writer, mode = Writer("Hm.\n</think>\n\nYes"), {"sampling_mode": "off"}
    assert TextGenerate.execute(writer, "Why?", 5, mode, thinking=True).args == ("Yes", "Hm.")
    assert TextGenerate.execute(writer, "Why?", 5, mode).args == (writer.answer, "")


def test_a_prompt_in_a_template_opens_no_thoughts() -> None:
    mode = {"sampling_mode": "off"}
    asked = ("Hm. </think> Yes", "Write <think>", 5, mode)
    writer, prompt, *rest = Writer(asked[0]), *asked[1:]
    assert TextGenerate.execute(writer, prompt, *rest).args == (asked[0], "")
    whole = TextGenerate.execute(writer, prompt, *rest, use_default_template=False)
    assert whole.args == ("Yes", "Hm.")


def test_sound_is_refused() -> None:
    audio = {"waveform": torch.zeros(1, 1, 8), "sample_rate": 8}
    with pytest.raises(ValueError, match="audio: none of the language models"):
        nodes_textgen.Seen(audio=audio).pictures()


def test_an_idea_for_a_video_comes_with_instructions() -> None:
    writer, mode = Writer(" A fox runs. "), {"sampling_mode": "off"}
    made = TextGenerateLTX2Prompt.execute(writer, "a fox", 5, mode)
    assert made.args == (" A fox runs. ", "")
    assert writer.asked["text"] == "a fox"
    assert writer.asked["system_prompt"] == nodes_textgen.VIDEO_FROM_TEXT
    image = torch.zeros(1, 8, 8, 3)
    TextGenerateLTX2Prompt.execute(writer, "a fox", 5, mode, image=image)
    assert writer.asked["system_prompt"] == nodes_textgen.VIDEO_FROM_IMAGE
    TextGenerateLTX2Prompt.execute(writer, "a fox", 5, mode, image=image, system_prompt="Sing.")
    assert writer.asked["system_prompt"] == "Sing."


def test_an_idea_that_finds_no_words_stays() -> None:
    mode = {"sampling_mode": "off"}
    for answer, thoughts in ((" \n", ""), ("<think>So", "So")):
        made = TextGenerateLTX2Prompt.execute(Writer(answer), "a fox", 5, mode)
        assert made.args == ("a fox", thoughts)
