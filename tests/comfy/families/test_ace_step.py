"""ACE-Step: its networks beside formulas written out here, and a small checkpoint from text to
sound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models
from torch import Tensor
from torch.nn import functional as F

from comfy import loading, text_loading
from comfy.families.ace_step import ACEStep, read_ace_step_config
from comfy.families.family import BrokenModelError
from comfy.ldm.ace.autoencoder import MusicDCAE, log_mel
from comfy.ldm.ace.dcae import DCAESizes, LevelSizes
from comfy.ldm.ace.lyrics import LyricEncoder, LyricSizes
from comfy.ldm.ace.model import ACEStepTransformer2DModel
from comfy.ldm.ace.vocoder import VocoderSizes
from comfy.ldm.t5.model import T5
from comfy.ops import disable_weight_init, manual_cast
from comfy.saving import save_checkpoint
from comfy.text_encoders.lyrics import LINE_END, START, LyricPieces
from comfy.vae.music_kinds import detect_music_dcae
from comfy.vae.vae import VAE
from comfy.weights import weight_norm
from comfy_extras.audio.latents import VAEDecodeAudio, VAEEncodeAudio
from comfy_extras.nodes_ace import EmptyAceStepLatentAudio, TextEncodeAceStepAudio
from comfy_nodes.conditioning import ConditioningZeroOut
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.small_files import PREFIX, prefixed
from tests.comfy.families.test_transformers import random_like
from tests.comfy.text_encoders.test_sentencepiece_file import piece_file

TEXT, WORDS = 32, 300
SIZES: dict[str, Any] = {
    "inner_dim": 96, "num_layers": 2, "num_attention_heads": 3, "mlp_ratio": 0.5,
    "speaker_embedding_dim": 8, "text_embedding_dim": TEXT, "ssl_latent_dims": [6, 5],
    "ssl_width": 7, "conv_width": 32, "lyric_encoder_vocab_size": WORDS,
    "lyric_hidden_size": 12, "lyric_heads": 3, "lyric_layers": 2, "lyric_inner": 10,
}  # fmt: skip
HEAD = 32
LEVELS = (LevelSizes(8, 1), LevelSizes(8, 2), LevelSizes(16, 1), LevelSizes(16, 1, (5,)))
DCAE = DCAESizes(channels=2, latent=8, encoder=LEVELS, decoder=LEVELS, head=8)
VOCODER = VocoderSizes(
    depths=(1, 2), widths=(8, 12), inner=2, width=8, rates=(16, 32), kernels=(32, 64),
    block_kernels=(3, 5), dilations=(1, 3), first_kernel=5, last_kernel=7,
)  # fmt: skip
CELL = 4096  # samples


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def rand(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def network() -> dict[str, Tensor]:
    weights = random_like(ACEStepTransformer2DModel(**SIZES), 4)
    return {  # what turns no channel off, and does not leave norms and biases at one
        key: value * rand(*value.shape, seed=len(key)) if value.ndim == 1 else value
        for key, value in weights.items()
    }


def autoencoder() -> dict[str, Tensor]:
    weights = random_like(MusicDCAE(DCAE, VOCODER), 5)
    head = {key: value for key, value in weights.items() if key.startswith("vocoder.head.")}
    return {key: v for key, v in weights.items() if key not in head} | weight_norm.parted(head)


def text_encoder(width: int = TEXT) -> dict[str, Tensor]:
    sizes = {
        "d_model": width, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 2, "vocab_size": 40,
        "model_type": "umt5",
    }  # fmt: skip
    vocabulary = {"spiece_model": torch.tensor(list(piece_file())).byte()}
    return random_like(T5(sizes, None, "cpu", manual_cast), 7) | vocabulary


def checkpoint(folder: Path) -> str:
    texts = text_encoder()
    tensors = prefixed(network(), PREFIX) | prefixed(autoencoder(), "vae.")
    tensors["text_encoders.spiece_model"] = texts.pop("spiece_model")
    tensors |= prefixed(texts, "text_encoders.umt5base.transformer.")
    path = str(folder / "ace_step.safetensors")
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return path


def lyric_file(path: Path) -> Path:
    """A vocabulary of letters, with languages and blanks as pieces of their own."""
    marks = ["[STOP]", "[UNK]", "[SPACE]", "[en]", "[de]", "[ja]", "[zh-cn]", "[", "]"]
    letters = [*"abcdefghijklmnopqrstuvwxyzäöü-,'"]
    vocabulary = {piece: number for number, piece in enumerate(marks + letters)}
    pieces = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]"))
    pieces.add_special_tokens([AddedToken(mark, special=True) for mark in marks[:7]])
    pieces.save(str(path))
    return path


# -- the networks beside formulas -----------------------------------------------------------------


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x: Tensor) -> Tensor:
    """``x [L, heads, D]``: channel pairs (0, 1), (2, 3)... with the speeds of channels 0, 1, ...,
    D / 2 - 1, 0, 1, ..."""
    out = torch.empty_like(x)
    for place in range(x.shape[0]):
        for channel in range(HEAD):
            speed = 1e6 ** -(2 * (channel % (HEAD // 2)) / HEAD)
            angle = place * speed
            other = x[place, :, channel + 1] * -1 if channel % 2 == 0 else x[place, :, channel - 1]
            out[place, :, channel] = x[place, :, channel] * math.cos(angle) + other * math.sin(
                angle
            )
    return out


def lyric_states(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Of one lyric ``[L, D]``, token by token."""
    root, (length, width) = "lyric_encoder.", x.shape

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), w[f"{name}.weight"], w[f"{name}.bias"])

    x = norm(f"{root}embed.out.1", linear(w, f"{root}embed.out.0", x)) * width**0.5
    for number in range(2):
        at = f"{root}encoders.{number}."
        given = norm(f"{at}norm_mha", x)
        q, k, v = (
            linear(w, f"{at}self_attn.linear_{name}", given).unflatten(-1, (3, -1))
            for name in "qkv"
        )
        u, far = w[f"{at}self_attn.pos_bias_u"], w[f"{at}self_attn.pos_bias_v"]
        scores = torch.empty(3, length, length)
        for i in range(length):
            for j in range(length):
                waves = torch.empty(width)
                for pair in range(width // 2):
                    angle = (i - j) * 10000 ** -(2 * pair / width)
                    waves[2 * pair], waves[2 * pair + 1] = math.sin(angle), math.cos(angle)
                p = linear(w, f"{at}self_attn.linear_pos", waves).unflatten(-1, (3, -1))
                scores[:, i, j] = ((q[i] + u) * k[j] + (q[i] + far) * p).sum(-1)
        seen = torch.einsum("hij,jhd->ihd", (scores / (width / 3) ** 0.5).softmax(-1), v)
        x = x + linear(w, f"{at}self_attn.linear_out", seen.flatten(1))
        inner = F.silu(linear(w, f"{at}feed_forward.w_1", norm(f"{at}norm_ff", x)))
        x = x + linear(w, f"{at}feed_forward.w_2", inner)
    return norm(f"{root}after_norm", x)


def velocity(w: dict[str, Tensor], x: Tensor, time: float, text: Tensor, lyrics: Tensor) -> Tensor:
    """Of one latent ``[8, 16, W]``."""
    angles = time * 10000 ** -(torch.arange(128) / 128)
    waves = torch.cat([angles.cos(), angles.sin()])
    t = linear(w, "timestep_embedder.linear_2",
               F.silu(linear(w, "timestep_embedder.linear_1", waves)))  # fmt: skip
    changes = linear(w, "t_block.1", F.silu(t)).unflatten(-1, (6, -1))
    words = linear(w, "lyric_proj", lyric_states(w, w["lyric_embs.weight"][lyrics]))
    voice = linear(w, "speaker_embedder", torch.zeros(1, 8))
    told = torch.cat([voice, linear(w, "genre_embedder", text), words])
    first = "proj_in.early_conv_layers."
    columns = torch.einsum("chw,dch->dw", x, w[f"{first}0.weight"][..., 0])
    columns = (columns + w[f"{first}0.bias"][:, None])[None]
    columns = F.group_norm(columns, 32, w[f"{first}1.weight"], w[f"{first}1.bias"], 1e-6)[0]
    tokens = F.linear(columns.T, w[f"{first}2.weight"][..., 0, 0], w[f"{first}2.bias"])
    for number in range(2):
        at = f"transformer_blocks.{number}."
        shift, scale, gate, shift2, scale2, gate2 = changes + w[f"{at}scale_shift_table"]

        def heads(name: str, x: Tensor, at: str = at) -> Tensor:
            return linear(w, f"{at}{name}", x).unflatten(-1, (3, HEAD))

        given = normed(tokens) * (1 + scale) + shift
        q, k = turned(heads("attn.to_q", given)).relu(), turned(heads("attn.to_k", given)).relu()
        share = torch.einsum("ihd,jhd->hij", q, k)
        share = share / share.sum(-1, keepdim=True)
        seen = torch.einsum("hij,jhd->ihd", share, heads("attn.to_v", given)).flatten(1)
        tokens = tokens + gate * linear(w, f"{at}attn.to_out.0", seen)
        q, k = turned(heads("cross_attn.to_q", tokens)), turned(heads("cross_attn.to_k", told))
        share = (torch.einsum("ihd,jhd->hij", q, k) / HEAD**0.5).softmax(-1)
        seen = torch.einsum("hij,jhd->ihd", share, heads("cross_attn.to_v", told)).flatten(1)
        tokens = tokens + linear(w, f"{at}cross_attn.to_out.0", seen)
        given = (normed(tokens) * (1 + scale2) + shift2).T[None]
        f = f"{at}ff."
        wide = F.conv1d(given, w[f"{f}inverted_conv.conv.weight"], w[f"{f}inverted_conv.conv.bias"])
        depth = w[f"{f}depth_conv.conv.weight"]
        wide = F.conv1d(
            F.silu(wide), depth, w[f"{f}depth_conv.conv.bias"], padding=1, groups=depth.shape[0]
        )
        value, slope = wide.chunk(2, dim=1)
        made = F.conv1d(value * F.silu(slope), w[f"{f}point_conv.conv.weight"])
        tokens = tokens + gate2 * made[0].T
    shift, scale = w["final_layer.scale_shift_table"] + t
    cells = linear(w, "final_layer.linear", normed(tokens) * (1 + scale) + shift)
    return cells.unflatten(-1, (16, 8)).permute(2, 1, 0)


def test_the_network_is_the_formula() -> None:
    weights = network()
    model = ACEStepTransformer2DModel(**SIZES).eval()
    model.load_state_dict(weights)
    x, text = rand(2, 8, 16, 5), rand(2, 4, TEXT, seed=2)
    lyrics = torch.tensor([[261, 7, 8, 9, 2], [261, 3, 3, 1, 2]])
    times = [901.0, 13.5]
    made = model(x, torch.tensor(times), text, lyric_token_idx=lyrics)
    exact = {key: value.double() for key, value in weights.items()}
    torch.set_default_dtype(torch.float64)
    try:
        for n, time in enumerate(times):
            wanted = velocity(exact, x[n].double(), time, text[n].double(), lyrics[n])
            torch.testing.assert_close(made[n].double(), wanted, rtol=1e-3, atol=2e-4)
    finally:
        torch.set_default_dtype(torch.float32)


def test_lyrics_count_as_much_as_is_told() -> None:
    model = ACEStepTransformer2DModel(**SIZES).eval()
    model.load_state_dict(network())
    words = torch.tensor([[START, 4, LINE_END]])
    told = [model._told(rand(1, 2, TEXT), None, words, strength) for strength in (1.0, 0.25)]
    torch.testing.assert_close(told[1][:, 3:], told[0][:, 3:] * 0.25)
    assert torch.equal(told[0][:, :3], told[1][:, :3])
    assert model._told(rand(1, 2, TEXT)).shape == (1, 3, 96)
    with pytest.raises(ValueError, match=r"16 rows.*EmptyAceStepLatentAudio"):
        model(rand(1, 8, 8, 4), torch.ones(1), rand(1, 2, TEXT))


@pytest.mark.parametrize("name", ["attn1_output_patch", "attn2_output_patch"])
def test_patches_see_the_output_of_an_attention_of_each_layer(name: str) -> None:
    model = ACEStepTransformer2DModel(**SIZES).eval()
    model.load_state_dict(network())
    seen = []

    def patch(attn: Tensor, told: dict[str, Any]) -> Tensor:
        seen.append((tuple(attn.shape), told["n_heads"], told["block_index"]))
        return attn * 0

    inputs = rand(1, 8, 16, 5), torch.ones(1), rand(1, 2, TEXT)
    patched = model(*inputs, transformer_options={"patches": {name: [patch]}})
    assert seen == [((1, 5, 96), 3, number) for number in range(2)]
    assert not torch.allclose(patched, model(*inputs))


def test_a_lyric_of_one_token_has_one_distance() -> None:
    sizes = LyricSizes(12, 3, 2, 10)
    encoder = LyricEncoder(sizes, disable_weight_init).eval()
    weights = random_like(encoder, 3)
    encoder.load_state_dict(weights)
    named = prefixed(weights, "lyric_encoder.")
    x = rand(1, 1, 12)
    torch.testing.assert_close(encoder(x)[0], lyric_states(named, x[0]), rtol=1e-4, atol=1e-5)


def test_spectra_are_those_of_mirrored_windows_in_slaneys_bands() -> None:
    sound = rand(2, 3 * 512, seed=3)
    edges = [40 * 3 / 200, 15 + 27 * math.log(16) / math.log(6.4)]
    mels = torch.linspace(*edges, 130, dtype=torch.float64).tolist()
    hertz = [m * 200 / 3 if m < 15 else 1000 * 6.4 ** ((m - 15) / 27) for m in mels]
    bins = np.arange(1025) * 44100 / 2048
    made = log_mel(sound, 128)
    assert made.shape == (2, 128, 3)
    mirrored = np.pad(sound.double().numpy(), ((0, 0), (768, 768)), mode="reflect")
    window = np.hanning(2049)[:-1]
    for frame in range(3):
        piece = mirrored[:, 512 * frame : 512 * frame + 2048] * window
        heard = np.sqrt(np.abs(np.fft.rfft(piece)) ** 2 + 1e-6)
        for band in (0, 1, 40, 127):
            low, middle, high = hertz[band : band + 3]
            weights = np.interp(bins, [low, middle, high], [0, 2 / (high - low), 0])
            wanted = np.log(np.maximum(heard @ weights, 1e-5))
            np.testing.assert_allclose(made[:, band, frame], wanted, atol=2e-4)
    assert log_mel(torch.zeros(1, CELL), 128).max() < -7.0


# -- the autoencoder at the door ------------------------------------------------------------------


def test_sizes_of_the_autoencoder_are_read_from_its_weights() -> None:
    for unshuffles, shuffles in ((False, False), (True, True)):
        sizes = DCAESizes(2, 8, LEVELS, LEVELS, 8, unshuffles, shuffles)
        spec = detect_music_dcae(random_like(MusicDCAE(sizes, VOCODER), 1), None)
        assert spec is not None
        assert spec.build.args == (sizes, VOCODER)  # type: ignore[attr-defined]
    assert (spec.latent_channels, spec.downscale_ratio, spec.extra_1d_channel) == (8, CELL, 16)


def test_sounds_become_latents_and_back_whole_and_in_tiles() -> None:
    vae = VAE(sd=autoencoder(), dtype=torch.float32)
    waveform = rand(1, 1, 3 * CELL + 100).clamp(-1, 1)  # one ear stands for both
    latent = VAEEncodeAudio.execute(vae, {"waveform": waveform, "sample_rate": 44100})[0]
    assert latent["samples"].shape == (1, 8, 16, 3)
    sound = VAEDecodeAudio.execute(vae, latent)[0]
    assert sound["sample_rate"] == 44100
    assert sound["waveform"].shape == (1, 2, 3 * CELL)
    assert sound["waveform"].std() > 0
    tiles = vae.encode_tiled(waveform.movedim(1, -1), tile_x=2 * CELL, overlap=CELL)
    assert tiles.shape == latent["samples"].shape
    pieces = vae.decode_tiled(latent["samples"], tile_x=2, overlap=1)
    assert pieces.shape == (1, 3 * CELL, 2)


def test_latents_have_the_scale_of_the_published_ones() -> None:
    vae = MusicDCAE(DCAE, VOCODER).eval()
    vae.load_state_dict(weight_norm.joined(autoencoder()))
    sound = rand(1, 2, CELL).clamp(-1, 1)
    unit = (log_mel(sound, 128) + 11) / 14 * 2 - 1
    torch.testing.assert_close(vae.encode(sound), (vae.dcae.encoder(unit) + 1.9091) * 0.1786)
    latent = rand(1, 8, 16, 1)
    spectra = (vae.dcae.decoder(latent / 0.1786 - 1.9091) / 2 + 0.5) * 14 - 11
    ears = [vae.vocoder(spectra[:, ear]) for ear in (0, 1)]
    torch.testing.assert_close(vae.decode(latent), torch.cat(ears, dim=1))


# -- lyrics ---------------------------------------------------------------------------------------


def test_lines_have_languages_and_ends(tmp_path: Path) -> None:
    pieces = LyricPieces([str(lyric_file(tmp_path / "ace_lyrics_vocab.json").parent)])
    known = pieces.get_vocab()

    def ids(*names: str) -> list[int]:
        return [known[name] for name in names]

    def lines(text: str) -> list[int]:
        return pieces(text)["input_ids"]

    assert lines("") == [START, LINE_END]
    assert lines("Hi  \"Yo\"\n\nna") == [
        START, *ids("[en]", "h", "i", "[SPACE]", "y", "o"), LINE_END, LINE_END,
        *ids("[en]", "n", "a"), LINE_END,
    ]  # fmt: skip
    assert lines("[DE]Süß")[1:5] == ids("[de]", "s", "ü", "[UNK]")
    assert lines("[zh]ni")[1:4] == ids("[zh-cn]", "n", "i")
    assert lines("[verse]")[1:4] == ids("[en]", "[", "v")
    assert lines("[xx]a")[1:4] == ids("[en]", "[", "x")
    assert lines("ガッタ")[1:-1] == ids("[ja]", *"gatta")
    assert lines("Mr. 2 & 3")[1:-1] == ids(
        "[en]", *"mister", "[SPACE]", *"two", "[SPACE]", *"and", "[SPACE]", *"three"
    )


def test_a_vocabulary_may_come_later_and_must_be_one(tmp_path: Path) -> None:
    pieces = LyricPieces([str(tmp_path)])
    assert pieces("\n") == {"input_ids": [START, LINE_END, LINE_END]}
    with pytest.raises(FileNotFoundError, match=r"lyrics: found 'la'.*ace_lyrics_vocab\.json"):
        pieces("la")
    path = tmp_path / "ace_lyrics_vocab.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"ace_lyrics_vocab\.json holds no vocabulary of lyrics"):
        pieces("la")
    lyric_file(path)
    assert len(pieces("la")["input_ids"]) == 5


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("1,000 men", "one thousand men"),
        ("the 21st of 12", "the twenty-first of twelve"),
        ("3.05", "three point zero five"),
        ("1234", "one thousand, two hundred and thirty-four"),
        ("2000003", "two million and three"),
        ("9" * 20, "9" * 20),
    ],
)
def test_english_numbers_are_spelled(text: str, read: str) -> None:
    from comfy.text_encoders.number_words import numbers_in_words

    assert numbers_in_words(text) == read


@pytest.mark.parametrize(
    ("kana", "latin"),
    [("きょうは", "kyouha"), ("シャツ", "shatsu"), ("ちょっと", "chotto"), ("じゅうぶん", "juubun"),
     ("スーパー!", "supa!"), ("東京タワー", "東京tawa"), ("ふじさん", "fujisan"),
     ("plain", "plain")],
)  # fmt: skip
def test_kana_are_written_in_latin_letters(kana: str, latin: str) -> None:
    from comfy.text_encoders.kana import in_latin_letters

    assert in_latin_letters(kana) == latin


# -- the family -----------------------------------------------------------------------------------


def test_sizes_are_read_from_the_weights_and_a_hole_is_named() -> None:
    weights = network()
    config = read_ace_step_config(weights)
    assert config is not None
    assert {name: config[name] for name in SIZES} == SIZES
    del weights["lyric_encoder.encoders.0.self_attn.pos_bias_u"]
    with pytest.raises(BrokenModelError, match=r"layout of ACE-Step, but lyric_encoder.*bias_u"):
        read_ace_step_config(weights)


def sampled(found: Any, clip: Any, lyrics: str = "", strength: float = 1.0) -> Tensor:
    positive = TextEncodeAceStepAudio.execute(clip, "a red cat", lyrics, strength)[0]
    (negative,) = ConditioningZeroOut().zero_out(positive)
    latent = EmptyAceStepLatentAudio.execute(1.0, 1)[0]
    made = common_ksampler(found.model, 3, 2, 2.0, "euler", "simple", positive, negative, latent)
    samples: Tensor = made[0]["samples"]
    return samples


def test_text_and_lyrics_become_a_sound_and_survive_saving(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    found: Any = loading.load_checkpoint_guess_config(path)
    assert isinstance(found.model.model.model_config, ACEStep)
    instrumental = sampled(found, found.clip)
    with pytest.raises(FileNotFoundError, match=r"found 'la la'.*ace_lyrics_vocab\.json"):
        sampled(found, found.clip, "la la")
    lyric_file(tmp_path / "ace_lyrics_vocab.json")
    sung = sampled(found, found.clip, "la la\nlo")
    assert sung.shape == (1, 8, 16, 10)
    assert not torch.allclose(sung, instrumental)
    assert not torch.allclose(sung, sampled(found, found.clip, "la la\nlo", 0.5))
    with pytest.raises(ValueError, match=rf"lyrics have token {WORDS}, and.* knows {WORDS}.*put"):
        found.model.model.extra_conds(conditioning_lyrics=torch.tensor([[START, WORDS]]))
    sound = VAEDecodeAudio.execute(found.vae, {"samples": sung})[0]["waveform"]
    assert sound.shape == (1, 2, 10 * CELL)
    assert sound.isfinite().all()
    again_path = str(tmp_path / "again.safetensors")
    save_checkpoint(again_path, found.model, found.clip, found.vae)
    assert set(load_file(path)) - set(load_file(again_path)) == set()
    again: Any = loading.load_checkpoint_guess_config(again_path)
    assert torch.equal(sampled(again, again.clip), instrumental)


def test_tokens_of_style_and_lyrics(tmp_path: Path) -> None:
    tensors = text_encoder(768)
    path = str(tmp_path / "umt5_base.safetensors")
    save_file(tensors, path)
    lyric_file(tmp_path / "ace_lyrics_vocab.json")
    clip = text_loading.load_clip([path], clip_type=text_loading.CLIPType.ACE)
    tokens = clip.tokenize("a red (cat:1.5)", lyrics="(a)")
    assert tokens["umt5base"] == [[(4, 1.0), (5, 1.0), (6, 1.5), (1, 1.0)]]
    ids = [token for token, _ in tokens["lyrics"][0]]
    assert ids[0] == START
    assert ids[-1] == LINE_END
    assert tokens["lyrics"][0][1][1] == 1.1
    assert [token for token, _ in clip.tokenize("", lyrics="")["lyrics"][0]] == [START]
    [[states, told]] = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat", lyrics="a"))
    assert states.shape == (1, 4, 768)
    assert told["conditioning_lyrics"].shape == (1, 4)
    assert "attention_mask" not in told
    assert told["pooled_output"] is None
