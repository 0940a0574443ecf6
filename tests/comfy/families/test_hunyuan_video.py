"""HunyuanVideo: the recorded network, its autoencoder, and small files from text to video."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.family import BrokenModelError
from comfy.families.hunyuan_layout import read_hunyuan_config, usual_key
from comfy.ldm.autoencoder.layers import AutoencoderConfig
from comfy.ldm.clip.text import CLIPTextModel
from comfy.ldm.hunyuan_video.model import HunyuanVideo
from comfy.ldm.hunyuan_video.vae import HunyuanVideoVAE
from comfy.ldm.llm.model import DecoderLLM
from comfy.ops import manual_cast
from comfy.saving import save_checkpoint
from comfy.text_encoders.hunyuan_video import HunyuanVideoTokenizer, LlamaPieces, taken_states
from comfy.vae.vae import VAE
from comfy_extras.nodes_hunyuan import TextEncodeHunyuanVideo_ImageToVideo
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.test_transformers import random_like
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

WIDTH, POOLED = 16, 64  # of the language model and of CLIP
TOLERANCE = 5e-5  # times of up to 1000 before their waves are taken
SIZES: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": POOLED, "context_in_dim": WIDTH,
    "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2, "depth": 1, "depth_single_blocks": 1,
    "axes_dim": [2, 6, 8],
}  # fmt: skip
VAE_SIZES = AutoencoderConfig(
    ch=8, ch_mult=(1, 2, 2, 2), num_res_blocks=1, z_channels=4, norm_num_groups=4
)
GROUPS = {"vae_config": '{"norm_num_groups": 4}'}
PREFIX = "model.model."


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def pieces(folder: Path) -> None:
    """A vocabulary of Llama's kind with a few words and the marks of a conversation."""
    words = {"a": 0, "cat": 1, "red": 2, "user": 882, "\n\n": 271, "<unk>": 3}
    marks = {"<|start_header_id|>": 128006, "<|end_header_id|>": 128007, "<|eot_id|>": 128009}
    tokenizer = Tokenizer(models.WordLevel({**words, **marks}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(folder / "llama_tokenizer.json"))


def text_encoders() -> dict[str, dict[str, Tensor]]:
    llama = {
        "vocab_size": 128320, "hidden_size": WIDTH, "intermediate_size": 8,
        "num_hidden_layers": 4, "num_attention_heads": 1, "num_key_value_heads": 1,
        "qk_norm": False,
    }  # fmt: skip
    clip = {
        "hidden_size": POOLED, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 1, "vocab_size": 49408,
    }  # fmt: skip
    return {
        "llama": random_like(DecoderLLM(llama, None, None, manual_cast), 6),
        "clip_l": random_like(CLIPTextModel(clip, None, "cpu", manual_cast), 7),
    }


def autoencoder() -> dict[str, Tensor]:
    sizes = AutoencoderConfig(
        ch=32, ch_mult=(1, 1, 1, 1), num_res_blocks=1, z_channels=16, norm_num_groups=32
    )
    return random_like(HunyuanVideoVAE(sizes), 5)


def checkpoint(folder: Path) -> str:
    pieces(folder)
    tensors = {PREFIX + key: value for key, value in random_like(HunyuanVideo(**SIZES), 4).items()}
    tensors |= {f"vae.{key}": value for key, value in autoencoder().items()}
    for name, weights in text_encoders().items():
        tensors |= {f"text_encoders.{name}.transformer.{k}": v for k, v in weights.items()}
    path = folder / "hunyuan_video.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return str(path)


def sampled(model: Any, clip: Any, **options: Any) -> Tensor:
    positive = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    positive = [[positive[0][0], {**positive[0][1], **options}]]
    latent = {"samples": torch.zeros(1, 16, 3, 4, 6)}
    made = common_ksampler(model, 3, 2, 1.0, "euler", "simple", positive, positive, latent)
    samples: Tensor = made[0]["samples"]
    return samples


@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_image21"])
def test_the_network_agrees_with_the_reference(name: str, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"nets/{name}.safetensors")
    model = HunyuanVideo(**net.constructor).eval()
    model.load_state_dict(net.weights)
    for call, args in net.calls().items():
        given = dict(args)
        out = model(given.pop("x"), given.pop("t"), **given)
        assert_close_to_golden(out, net.outputs[call], TOLERANCE)


def test_the_recorded_sizes_are_read_from_the_weights(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/hunyuan_video.safetensors")
    config = read_hunyuan_config(net.weights)
    assert config is not None
    own = {key for key in net.constructor if key != "axes_dim"}  # not to be told from shapes
    assert {key: config[key] for key in own} == {key: net.constructor[key] for key in own}


def test_names_of_published_files_are_the_recorded_ones(golden_json: Callable[[str], Any]) -> None:
    renames = golden_json("model_families.json")["unet_key_renames"]
    for published, own in renames["HunyuanVideo (and subclasses)"].items():
        assert usual_key(published) == own
        assert usual_key(own) == own


def test_a_hole_is_named() -> None:
    weights = random_like(HunyuanVideo(**SIZES), 4)
    del weights["txt_in.input_embedder.weight"]
    with pytest.raises(BrokenModelError, match="layout of HunyuanVideo, but txt_in"):
        read_hunyuan_config(weights)


def test_text_becomes_a_video_and_survives_saving(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path))
    assert type(found.model.model.model_config).__name__ == "HunyuanVideo"
    latent = sampled(found.model, found.clip)
    assert latent.isfinite().all()
    assert not torch.equal(sampled(found.model, found.clip, guidance=1.0), latent)
    video = found.vae.decode(latent)
    assert video.shape == (1, 9, 32, 48, 3)
    again_path = str(tmp_path / "again.safetensors")
    save_checkpoint(again_path, found.model, found.clip, found.vae)
    again: Any = loading.load_checkpoint_guess_config(again_path)
    assert torch.equal(sampled(again.model, again.clip), latent)


def test_a_given_first_frame_and_a_picture_to_look_at_count(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path))
    plain = sampled(found.model, found.clip)
    assert not torch.equal(sampled(found.model, found.clip, guiding_frame_index=0), plain)
    seen = torch.ones(1, 16, 1, 4, 6)
    assert not torch.equal(sampled(found.model, found.clip, ref_latent=seen), plain)


def test_a_picture_to_video_network_takes_a_picture_and_a_mask(tmp_path: Path) -> None:
    pieces(tmp_path)
    network = random_like(HunyuanVideo(**{**SIZES, "in_channels": 33}), 4)
    save_file({k: v.contiguous() for k, v in network.items()}, tmp_path / "model.safetensors")
    paths = []
    for name, weights in text_encoders().items():
        paths.append(str(tmp_path / f"{name}.safetensors"))
        save_file({k: v.contiguous() for k, v in weights.items()}, paths[-1])
    model = loading.load_diffusion_model(str(tmp_path / "model.safetensors"))
    clip = text_loading.load_clip(paths, clip_type=text_loading.CLIPType.HUNYUAN_VIDEO)
    assert type(model.model.model_config).__name__ == "HunyuanVideoI2V"
    image = {"concat_latent_image": torch.ones(1, 16, 1, 4, 6)}
    mask = {"concat_mask": torch.zeros(1, 1, 1, 4, 6)}
    videos = [sampled(model, clip, **given) for given in ({}, image, {**image, **mask})]
    assert not torch.equal(videos[0], videos[1])
    assert not torch.equal(videos[1], videos[2])


def test_conditioning_is_the_persons_words_alone(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path))
    tokens = found.clip.tokenize("a (red:1.5) cat")
    ids = [token for token, _ in tokens["llama"][0]]
    assert len(ids) == 256
    (words,) = taken_states(ids)
    assert ids[words.start - 2 : words.start + 1] == [128006, 882, 128007]  # no new lines here
    assert ids[words.stop - 1] == 128009
    [[cond, told]] = found.clip.encode_from_tokens_scheduled(tokens)
    assert cond.shape == (1, words.stop - words.start, WIDTH)
    assert told["pooled_output"].shape == (1, POOLED)
    assert "attention_mask" not in told


def test_what_is_taken_begins_behind_the_new_lines_and_ends_with_the_turn() -> None:
    turn = [128006, 882, 128007]
    assert taken_states([1, *turn, 271, 5, 128009, 7]) == [slice(5, 7)]
    assert taken_states([1, *turn, 5]) == [slice(3, None)]
    assert taken_states([1, 2, 3]) == [slice(0, None)]
    picture = {"data": torch.zeros(10, 4), "original_type": "image", "image_interleave": 3}
    taken = taken_states([1, picture, 2, *turn, 271, 5, 128009, 7])
    assert taken == [slice(1, 11, 3), slice(16, 18)]
    taken = taken_states([1, *turn, 271, 5, picture, 128009])
    assert taken == [slice(5, 17)]


def test_the_language_model_looks_at_the_first_picture(tmp_path: Path) -> None:
    clip: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path)).clip
    rows = torch.rand(1, 12, WIDTH, generator=torch.Generator().manual_seed(4))

    def encoded(rows: Tensor, interleave: int = 2) -> Tensor:
        seen = SimpleNamespace(mm_projected=rows)
        made = TextEncodeHunyuanVideo_ImageToVideo.execute(clip, seen, "a cat", interleave)
        cond: Tensor = made[0][0][0]
        return cond

    one = encoded(rows)
    assert not torch.allclose(encoded(rows.flip(1)), one, atol=1e-5)
    every = encoded(rows, 1)
    assert every.shape[1] - one.shape[1] == 6
    assert torch.equal(every[:, :12:2], one[:, :6])
    assert torch.equal(every[:, 12:], one[:, 6:])
    with pytest.raises(ValueError, match=r"expected 16 channels.*found 8.*llava_llama3_vision"):
        encoded(rows[..., :8])


def test_without_a_vocabulary_the_error_says_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Llama 3 were not found.*llama_tokenizer\.json"):
        HunyuanVideoTokenizer()
    (tmp_path / "llama_tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no word pieces of Llama 3"):
        LlamaPieces.from_pretrained(str(tmp_path / "llama_tokenizer.json"))


def test_the_autoencoder_gives_what_another_implementation_gives() -> None:
    """The numbers come from the implementation of the diffusers library, on these weights."""
    network = HunyuanVideoVAE(VAE_SIZES).eval()
    network.load_state_dict(random_like(network, 5))
    generator = torch.Generator().manual_seed(3)
    latent = torch.randn(1, 4, 3, 2, 3, generator=generator)
    video = torch.randn(1, 3, 9, 16, 24, generator=generator)
    expected = torch.tensor([[-14.46206665, -14.59862328, -18.38804245],
                             [-11.02902699, -8.93687725, -7.88822079],
                             [12.36600208, 10.56563091, 13.07762051]])  # fmt: skip
    decoded = network.decode(latent)[0, :, [0, 3, 8], 5, 7]
    torch.testing.assert_close(decoded, expected, rtol=1e-4, atol=1e-3)
    expected = torch.tensor([-72.90785217, -30.0557003, 35.31410599, -109.68408966])
    torch.testing.assert_close(network.encode(video)[0, :, 1, 1, 2], expected, rtol=1e-4, atol=1e-3)


def test_the_autoencoder_takes_what_fits_four_frames_and_one() -> None:
    weights = random_like(HunyuanVideoVAE(VAE_SIZES), 5)
    vae = VAE(sd=weights, metadata=GROUPS, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    frames = torch.rand(11, 16, 24, 3, generator=generator)
    latent = vae.encode(frames)
    assert latent.shape == (1, 4, 3, 2, 3)
    assert torch.equal(vae.encode(frames[:9]), latent)
    assert vae.decode(latent).shape == (1, 9, 16, 24, 3)
    assert vae.decode(latent[:, :, :1]).shape == (1, 1, 16, 24, 3)
    assert vae.temporal_compression_decode() == 4
