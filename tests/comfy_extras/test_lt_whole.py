"""LTX-2 from one checkpoint, and Gemma beside it, to a video with its sound, node by node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import folder_paths
from comfy.ldm.lightricks.av_model import LTXAVModel
from comfy.ldm.lightricks.vae.causal_video_autoencoder import LTXVideoVAE
from comfy_extras import nodes_lt as lt
from comfy_extras import nodes_lt_audio as sound
from comfy_nodes import loaders
from comfy_nodes.conditioning import CLIPTextEncode
from comfy_nodes.sampling import KSampler
from comfy_nodes.vae import VAEDecode
from tests.comfy.families import test_ltxav, test_ltxv
from tests.comfy.families.small_files import PREFIX, prefixed
from tests.comfy.families.test_transformers import random_like
from tests.comfy.text_encoders import test_lt
from tests.comfy.text_encoders.test_lumina2 import VOCABULARY
from tests.comfy_extras import test_lt_audio

NETWORK = {**test_ltxav.SIZES, "caption_channels": test_lt.WIDTH}


def checkpoint(path: Path, later: bool = False) -> None:
    """A small file of LTX-2, or of LTX-2.3, with all that belongs to it but Gemma."""
    network = test_ltxav.LATER if later else NETWORK
    video = test_ltxv.LATER if later else test_ltxv.SECOND_GENERATION
    autoencoder = random_like(LTXVideoVAE(replace(video, z_channels=128)), 5)
    for name, value in (("std-of-means", 1.0), ("mean-of-means", 0.0)):
        autoencoder[f"per_channel_statistics.{name}"] = torch.full((128,), value)
    heard = {**test_lt_audio.weights(), **(test_lt_audio.wide_file() if later else {})}
    texts = test_lt.connectors(test_lt.LATER if later else test_lt.SIZES)
    whole = {
        **prefixed(test_ltxav.varied(LTXAVModel(**network), 4), PREFIX),
        **prefixed(autoencoder, "vae."),
        **{key: value for key, value in heard.items() if value is not None},
        **test_lt.in_checkpoint(texts),
    }
    whole = {key: value.contiguous() for key, value in whole.items()}
    header = {"config": json.dumps(test_lt_audio.WIDE_HEADER)} if later else None
    save_file(whole, path, metadata=header)


def gemma(path: Path) -> None:
    """A small file of Gemma with its vocabulary."""
    held = {"spiece_model": torch.tensor(list(VOCABULARY)).byte()}
    save_file({**test_lt.gemma(), **held}, path)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("text_encoders", "checkpoints", "loras"):
        (tmp_path / name).mkdir()
        entry = ([str(tmp_path / name)], folder_paths.supported_pt_extensions)
        monkeypatch.setitem(folder_paths.folder_names_and_paths, name, entry)
    gemma(tmp_path / "text_encoders/gemma.safetensors")
    checkpoint(tmp_path / "checkpoints/ltx2.safetensors")
    return tmp_path


def made(model: Any, clip: Any, audio_vae: Any) -> Any:
    """Nine frames with their sound, as a latent."""
    positive, negative = (CLIPTextEncode().encode(clip, text)[0] for text in ("cat cat", ""))
    conds = lt.LTXVConditioning.execute(positive, negative, 24.0)
    video = lt.EmptyLTXVLatentVideo.execute(96, 64, 9, 1)[0]
    silence = sound.LTXVEmptyLatentAudio.execute(9, 24, 1, audio_vae)[0]
    latent = lt.LTXVConcatAVLatent.execute(video, silence)[0]
    steps = (3, 2, 2.0, "euler", "simple")
    return KSampler().sample(model, *steps, conds[0], conds[1], latent)[0]


def test_a_text_becomes_a_video_with_its_sound(folders: Path) -> None:
    name = "ltx2.safetensors"
    model, none, vae = loaders.CheckpointLoaderSimple().load_checkpoint(name)
    assert none is None  # as published: the text encoder has a file of its own
    clip = sound.LTXAVTextEncoderLoader.execute("gemma.safetensors", name)[0]
    audio_vae = sound.LTXVAudioVAELoader.execute(name)[0]
    latent = made(model, clip, audio_vae)
    parts = lt.LTXVSeparateAVLatent.execute(latent)
    assert parts[0]["samples"].shape == (1, 128, 2, 2, 3)
    assert parts[1]["samples"].shape == (1, 4, 10, 4)  # 9 / 24 of a second, 25 cells each
    frames = VAEDecode().decode(vae, parts[0])[0]
    assert frames.shape == (9, 64, 96, 3)
    heard = sound.LTXVAudioVAEDecode.execute(latent, audio_vae)[0]
    assert heard["waveform"].shape == (1, 2, 37 * 240)
    assert heard["waveform"].std() > 0


@pytest.mark.parametrize(
    ("key", "rows", "columns"),
    [
        ("diffusion_model.transformer_blocks.0.audio_to_video_attn.to_q", 64, 128),
        ("transformer.transformer_blocks.1.audio_attn1.to_out.0", 64, 64),
        ("transformer.audio_proj_in", 64, 16),
        ("transformer.av_cross_attn_audio_v2a_gate.linear", 64, 64),
        ("transformer.audio_time_embed.emb.timestep_embedder.linear_1", 64, 256),
    ],
)
def test_loras_change_video_and_sound(key: str, rows: int, columns: int, folders: Path) -> None:
    model = loaders.CheckpointLoaderSimple().load_checkpoint("ltx2.safetensors")[0]
    lora = {
        f"{key}.lora_A.weight": test_ltxav.noise(2, columns),
        f"{key}.lora_B.weight": test_ltxav.noise(rows, 2),
    }
    save_file(lora, folders / "loras/lora.safetensors")
    view, _ = loaders.LoraLoader().load_lora(model, None, "lora.safetensors", 1.0, 1.0)
    plain, changed = (test_ltxav.sampled(one, text=test_lt.WIDTH) for one in (model, view))
    assert all(not torch.allclose(a, b) for a, b in zip(plain, changed))
