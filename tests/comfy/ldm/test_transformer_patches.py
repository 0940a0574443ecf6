"""What custom nodes put into transformers acts, in every network and at every place it declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from comfy.ldm.audio.dit import AudioDiffusionTransformer
from comfy.ldm.aura.mmdit import MMDiT
from comfy.ldm.chroma.model import Chroma
from comfy.ldm.cosmos.predict2 import MiniTrainDIT
from comfy.ldm.flux.model import Flux
from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel
from comfy.ldm.hunyuan3d.model import Hunyuan3Dv2
from comfy.ldm.hunyuan_video.model import HunyuanVideo
from comfy.ldm.hydit.models import HunYuanDiT
from comfy.ldm.kandinsky5.model import Kandinsky5
from comfy.ldm.lightricks.model import LTXVModel
from comfy.ldm.lumina.model import NextDiT
from comfy.ldm.mmdit.model import OpenAISignatureMMDITWrapper
from comfy.ldm.omnigen.omnigen2 import OmniGen2Transformer2DModel
from comfy.ldm.pixart.pixartms import PixArtMS
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.ldm.wan.model import WanModel
from tests.support.golden_nets import read_golden_net

NETWORKS: dict[str, Any] = {
    "stable_audio_dit": AudioDiffusionTransformer,
    "auraflow": MMDiT,
    "hunyuan_dit": HunYuanDiT,
    "hidream": HiDreamImageTransformer2DModel,
    "cosmos_predict2": MiniTrainDIT,
    "omnigen2": OmniGen2Transformer2DModel,
    "kandinsky5": Kandinsky5,
    "flux": Flux,
    "chroma": Chroma,
    "pixart_sigma": PixArtMS,
    "ltxv": LTXVModel,
    "hunyuan_video": HunyuanVideo,
    "flux2": Flux,
    "hunyuan3d2": Hunyuan3Dv2,
    "sd3_mmdit": OpenAISignatureMMDITWrapper,
    "qwen_image": QwenImageTransformer2DModel,
    "z_image": NextDiT,
    "lumina2": NextDiT,
    "wan21_t2v": WanModel,
}
PLACES = [(name, patch) for name, kind in NETWORKS.items() for patch in sorted(kind.reads_patches)]
Options = dict[str, Any]


class Small:
    """A recorded small network with inputs for it."""

    def __init__(self, folder: Path, name: str) -> None:
        net = read_golden_net(folder / f"nets/{name}.safetensors")
        self.network: nn.Module = NETWORKS[name](**net.constructor).eval()
        self.network.load_state_dict(net.weights)
        inputs = net.inputs if "x" in net.inputs else net.calls()["a"]
        self.given = {
            key: inputs[key]
            for key in (
                "x",
                "context",
                "y",
                "encoder_hidden_states_llama3",
                "encoder_hidden_states_t5",
            )
            if key in inputs
        }
        self.time = inputs["t"]

    def __call__(self, options: Options | None = None) -> Tensor:
        given = dict(self.given)
        x = given.pop("x")
        options = {} if options is None else options
        out: Tensor = self.network(x, self.time, **given, transformer_options=options)
        return out


def options_of(name: str, patch: Any) -> Options:
    """Options with a patch at a declared place."""
    if name == "dit":
        return {"patches_replace": {"dit": {("double_block", 0): patch}}}
    return {"patches": {name: [patch]}}


def changing(name: str, share: float) -> Any:
    """A patch of the place's form that adds to each of the picture's tokens one of the others."""

    def mixed(x: Tensor) -> Tensor:
        return x + share * x.flip(1)

    def attention(out: Tensor, extra: Options) -> Tensor:
        return mixed(out)

    def block(args: Options, extra: Options) -> Options:
        out = extra["original_block"](args)
        return {**out, "img": mixed(out["img"])}

    def tokens(args: Options) -> Options:
        return {**args, "img": mixed(args["img"])}

    return {"dit": block}.get(name, attention if name.endswith("output_patch") else tokens)


@pytest.mark.parametrize(("network", "place"), PLACES)
@torch.inference_mode()
def test_a_patch_acts_where_a_network_says_it_reads_it(
    network: str, place: str, golden_folder: Path
) -> None:
    small = Small(golden_folder, network)
    plain = small()
    assert torch.equal(small(options_of(place, changing(place, 0.0))), plain)
    changed = small(options_of(place, changing(place, 0.5)))
    assert changed.shape == plain.shape
    assert not torch.allclose(changed, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("network", ["qwen_image", "z_image"])
@torch.inference_mode()
def test_attention_tells_where_the_picture_is(network: str, golden_folder: Path) -> None:
    """And no other network's place is left over in the options."""
    small = Small(golden_folder, network)
    seen: list[Options] = []

    def look(out: Tensor, extra: Options) -> Tensor:
        start, stop = extra["img_slice"]
        assert stop == out.shape[1] > start > 0
        assert out.shape[-1] == extra["n_heads"] * extra["dim_head"]
        seen.append(extra)
        return out

    small({**options_of("attn1_output_patch", look), "sigmas": 1})
    count = seen[0]["total_blocks"]
    assert [extra["block_index"] for extra in seen] == list(range(count))
    assert all(extra["sigmas"] == 1 and "patches" not in extra for extra in seen)


@torch.inference_mode()
def test_attention_of_a_video_to_itself_has_no_place_of_text(golden_folder: Path) -> None:
    small = Small(golden_folder, "wan21_t2v")
    seen = []

    def look(out: Tensor, extra: Options) -> Tensor:
        seen.append("img_slice" in extra)
        return out

    small({**options_of("attn1_output_patch", look), "img_slice": [1, 2]})
    assert seen
    assert not any(seen)


@torch.inference_mode()
def test_tokens_put_before_the_text_find_places(golden_folder: Path) -> None:
    """As the style projectors do it."""
    small = Small(golden_folder, "qwen_image")

    def longer(args: Options) -> Options:
        txt, ids = args["txt"], args["txt_ids"]
        whole = torch.cat([txt[:, :2], txt], dim=1)
        return {**args, "txt": whole, "txt_ids": torch.cat([ids[:, :2] * 0, ids], dim=1)}

    plain = small()
    made = small(options_of("post_input", longer))
    assert made.shape == plain.shape
    assert not torch.allclose(made, plain)


@pytest.mark.parametrize("place", ["noise_refiner", "double_block"])
@torch.inference_mode()
def test_a_patch_of_z_image_may_work_in_place_and_give_nothing(
    place: str, golden_folder: Path
) -> None:
    small = Small(golden_folder, "z_image")
    plain = small()
    seen: list[set[str]] = []

    def in_place(args: Options) -> None:
        seen.append(set(args))
        assert args["img_input"].shape == args["img"].shape
        assert args["pe"].shape[2] == args["img"].shape[1]
        assert args["block_type"] == place
        args["img"] += 0.5

    assert not torch.allclose(small(options_of(place, in_place)), plain)
    assert {"x", "vec", "txt", "block_index", "transformer_options"} <= seen[0]


@pytest.mark.parametrize("network", ["qwen_image", "z_image", "wan21_t2v"])
@torch.inference_mode()
def test_a_skipped_block_is_one_that_gives_back_what_it_got(
    network: str, golden_folder: Path
) -> None:
    small = Small(golden_folder, network)
    plain = small()
    skipped = small(options_of("dit", lambda args, extra: args))
    assert skipped.isfinite().all()
    assert not torch.allclose(skipped, plain, rtol=1e-3, atol=1e-3)


class Norms(TorchFunctionMode):
    """Counts norms over the last axis, and those whose tokens do not lie so."""

    functions = (functional.layer_norm, functional.rms_norm)

    def __init__(self) -> None:
        super().__init__()
        self.count, self.apart = 0, 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in self.functions:
            self.count += 1
            self.apart += args[0].stride(-1) != 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("network", NETWORKS)
@torch.inference_mode()
def test_norms_find_the_channels_of_a_token_side_by_side(network: str, golden_folder: Path) -> None:
    """Else each of them copies its input first, and sums walk through memory in steps."""
    small = Small(golden_folder, network)
    with Norms() as norms:
        small()
    assert norms.count
    assert not norms.apart
