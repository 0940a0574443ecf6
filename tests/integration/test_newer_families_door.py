"""Small models of newer families at the public door: files in their folders, a graph over HTTP,
and what comes out.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest
from PIL import Image
from torch import Tensor

from comfy.text_encoders import qwen
from tests.comfy.families import (
    test_ace_step,
    test_ace_step15,
    test_auraflow,
    test_cascade,
    test_chroma_radiance,
    test_cosmos,
    test_cosmos_video,
    test_hidream,
    test_hunyuan3d21,
    test_hunyuan_dit,
    test_kandinsky5,
    test_lumina2,
    test_mochi,
    test_newbie,
    test_omnigen2,
    test_qwen,
    test_stable_audio,
    test_transformers,
    test_wan,
)
from tests.comfy.families.small_files import PREFIX, prefixed, write
from tests.comfy_extras import test_lt_whole
from tests.support.server_process import ServerProcess, running_server

Graph = dict[str, Any]
FOLDERS = ("checkpoints", "diffusion_models", "text_encoders", "vae")
RUN = {
    "seed": 3, "steps": 2, "cfg": 2.0, "sampler_name": "euler", "scheduler": "simple",
    "denoise": 1.0,
}  # fmt: skip


def node(class_type: str, **inputs: Any) -> Graph:
    return {"class_type": class_type, "inputs": inputs}


def graph(loaders: Graph, model: Any, clip: Any, vae: Any, latent: Graph) -> Graph:
    """Text to picture from nodes that load the parts."""
    return {
        **loaders,
        "text": node("CLIPTextEncode", text="a red cat", clip=clip),
        "none": node("CLIPTextEncode", text="", clip=clip),
        "latent": latent,
        "run": node(
            "KSampler", **RUN, model=model, positive=["text", 0], negative=["none", 0],
            latent_image=["latent", 0],
        ),
        "decode": node("VAEDecode", samples=["run", 0], vae=vae),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="family"),
    }  # fmt: skip


def apart(clip: Graph, latent: Graph, vae: str, name: str) -> Graph:
    """The graph of a network, an encoder and an autoencoder in files of their own."""
    loaders = {
        "model": node("UNETLoader", unet_name=f"{name}.safetensors", weight_dtype="default"),
        "clip": clip,
        "vae": node("VAELoader", vae_name=vae),
    }
    return graph(loaders, ["model", 0], ["clip", 0], ["vae", 0], latent)


def one(name: str, kind: str) -> Graph:
    return node("CLIPLoader", clip_name=f"{name}_te.safetensors", type=kind)


def empty(class_type: str, **others: int) -> Graph:
    return node(class_type, width=64, height=64, batch_size=1, **others)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models that the server looks into."""
    models = tmp_path_factory.mktemp("newer") / "more"
    for name in FOLDERS:
        (models / name).mkdir(parents=True)
    encoders = models / "text_encoders"
    test_transformers.pieces(encoders)
    test_auraflow.pieces(encoders)
    test_qwen.pieces(encoders)
    weights: dict[str, tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]] = {
        "lumina2": (test_lumina2.network(), {"": test_lumina2.text_encoder()}),
        "cosmos": (test_cosmos.network(), {"": test_cosmos.text_encoder()}),
        "omnigen2": (test_omnigen2.network(), {"": test_omnigen2.text_encoder()}),
        "mochi": (test_mochi.network(), {"": test_mochi.text_encoder()}),
        "kandinsky5": (test_kandinsky5.network(test_kandinsky5.PICTURE), {}),
        "newbie": (
            test_newbie.network(),
            {"_gemma": test_newbie.gemma3(), "_jina": test_newbie.jina()},
        ),
    }
    for name, (network, texts) in weights.items():
        write(network, models / "diffusion_models" / f"{name}.safetensors")
        for ending, encoder in texts.items():
            write(encoder, encoders / f"{name}_te{ending}.safetensors")
    for name, encoder in test_kandinsky5.encoders().items():
        write(encoder, encoders / f"kandinsky5_{name}.safetensors")
    write(test_transformers.autoencoder(), models / "vae" / "flux_small.safetensors")
    write(test_mochi.autoencoder(), models / "vae" / "mochi_small.safetensors")
    write(test_wan.wan_autoencoder(), models / "vae" / "wan_small.safetensors")
    test_stable_audio.checkpoint(models / "checkpoints")
    write(test_stable_audio.text_encoder(), encoders / "audio_te.safetensors")
    test_ace_step.checkpoint(models / "checkpoints")
    test_ace_step.lyric_file(encoders / "ace_lyrics_vocab.json")
    test_ace_step15.write_parts(models)
    for stage in "cb":
        test_cascade.checkpoint(models / "checkpoints", stage)
    tensors = prefixed(test_auraflow.network(), PREFIX)
    tensors |= prefixed(test_auraflow.text_encoder(), test_auraflow.ENCODER)
    write(tensors, models / "checkpoints" / "auraflow.safetensors")
    test_cosmos_video.checkpoint(models / "checkpoints", 17)
    test_hunyuan_dit.checkpoint(models / "checkpoints")
    test_chroma_radiance.checkpoint(models / "checkpoints")
    test_hunyuan3d21.checkpoint(models / "checkpoints")
    test_lt_whole.checkpoint(models / "checkpoints" / "ltx23.safetensors", later=True)
    test_lt_whole.gemma(encoders / "gemma3_12b_te.safetensors")
    write(test_hidream.network(), models / "diffusion_models" / "hidream.safetensors")
    return models


@pytest.fixture(scope="module")
def families(folders: Path) -> Iterator[ServerProcess]:
    """A server that finds them."""
    lines = ["more:", f"    base_path: {folders}", *(f"    {name}: {name}" for name in FOLDERS)]
    config = folders.parent / "more.yaml"
    config.write_text("\n".join(lines))
    arguments = ("--cpu", "--extra-model-paths-config", str(config))
    with running_server(folders.parent / "server", *arguments) as running:
        yield running


APART = {
    "lumina2": (one("lumina2", "lumina2"), empty("EmptySD3LatentImage"), "flux_small"),
    "cosmos": (one("cosmos", "cosmos"), empty("EmptySD3LatentImage"), "wan_small"),
    "mochi": (one("mochi", "mochi"), empty("EmptyMochiLatentVideo", length=7), "mochi_small"),
    "omnigen2": (one("omnigen2", "omnigen2"), empty("EmptySD3LatentImage"), "flux_small"),
    "kandinsky5": (
        node(
            "DualCLIPLoader", type="kandinsky5_image", clip_name1="kandinsky5_clip_l.safetensors",
            clip_name2=f"kandinsky5_{qwen.QWEN25_7B}.safetensors",
        ),
        empty("EmptySD3LatentImage"),
        "flux_small",
    ),
    "newbie": (
        node(
            "DualCLIPLoader", type="newbie", clip_name1="newbie_te_gemma.safetensors",
            clip_name2="newbie_te_jina.safetensors",
        ),
        empty("EmptySD3LatentImage"),
        "flux_small",
    ),
}  # fmt: skip


def picture_of(server: ServerProcess, prompt: Graph) -> Image.Image:
    entry = server.run(prompt)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    return Image.open(io.BytesIO(server.picture(entry, "save")))


@pytest.mark.parametrize("name", APART)
def test_a_model_in_parts_makes_a_picture(name: str, families: ServerProcess) -> None:
    clip, latent, vae = APART[name]
    picture = picture_of(families, apart(clip, latent, f"{vae}.safetensors", name))
    assert picture.size == (64, 64)


def test_an_auraflow_checkpoint_makes_a_picture(families: ServerProcess) -> None:
    loaders = {
        "all": node("CheckpointLoaderSimple", ckpt_name="auraflow.safetensors"),
        "demo": node("CheckpointLoaderSimple", ckpt_name="latentloom-demo.safetensors"),
        "shift": node("ModelSamplingAuraFlow", model=["all", 0], shift=1.5),
    }
    latent = empty("EmptyLatentImage")
    picture = picture_of(families, graph(loaders, ["shift", 0], ["all", 1], ["demo", 2], latent))
    assert picture.width == picture.height > 0


def test_a_hunyuan_dit_checkpoint_makes_a_picture_of_two_texts(families: ServerProcess) -> None:
    loaders = {
        "all": node("CheckpointLoaderSimple", ckpt_name="hunyuan_dit.safetensors"),
        "demo": node("CheckpointLoaderSimple", ckpt_name="latentloom-demo.safetensors"),
    }
    prompt = graph(loaders, ["all", 0], ["all", 1], ["demo", 2], empty("EmptyLatentImage"))
    prompt["text"] = node(
        "CLIPTextEncodeHunyuanDiT", clip=["all", 1], bert="a red cat", mt5xl="a cat"
    )
    picture = picture_of(families, prompt)
    assert picture.width == picture.height > 0


def test_a_chroma_radiance_checkpoint_makes_a_picture_by_pixels(families: ServerProcess) -> None:
    loaders = {
        "all": node("CheckpointLoaderSimple", ckpt_name="radiance.safetensors"),
        "tiles": node(
            "ChromaRadianceOptions", model=["all", 0], preserve_wrapper=True, start_sigma=1.0,
            end_sigma=0.0, nerf_tile_size=2,
        ),
    }  # fmt: skip
    latent = node("EmptyChromaRadianceLatentImage", width=30, height=24, batch_size=1)
    prompt = graph(loaders, ["tiles", 0], ["all", 1], ["all", 2], latent)
    assert picture_of(families, prompt).size == (30, 24)


def test_a_hunyuan3d_checkpoint_makes_a_shape_of_a_picture(families: ServerProcess) -> None:
    prompt = {
        "all": node("ImageOnlyCheckpointLoader", ckpt_name="hunyuan3d21.safetensors"),
        "picture": node("EmptyImage", width=64, height=48, batch_size=1, color=0x3366AA),
        "seen": node("CLIPVisionEncode", clip_vision=["all", 1], image=["picture", 0], crop="none"),
        "text": node("Hunyuan3Dv2Conditioning", clip_vision_output=["seen", 0]),
        "latent": node("EmptyLatentHunyuan3Dv2", resolution=16, batch_size=1),
        "run": node(
            "KSampler", **RUN, model=["all", 0], positive=["text", 0], negative=["text", 1],
            latent_image=["latent", 0],
        ),
        "decode": node(
            "VAEDecodeHunyuan3D", samples=["run", 0], vae=["all", 2], num_chunks=8000,
            octree_resolution=16,
        ),
        "mesh": node("VoxelToMesh", voxel=["decode", 0], algorithm="surface net", threshold=0.5),
        "save": node("SaveGLB", mesh=["mesh", 0], filename_prefix="shape"),
    }  # fmt: skip
    entry = families.run(prompt)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    assert entry["outputs"]["save"]["3d"][0]["filename"].endswith(".glb")


def test_cosmos_goes_on_from_a_picture(families: ServerProcess) -> None:
    loaders = {
        "all": node("CheckpointLoaderSimple", ckpt_name="cosmos1.safetensors"),
        "picture": node("EmptyImage", width=64, height=48, batch_size=1, color=0x3366AA),
    }
    latent = node(
        "CosmosImageToVideoLatent", vae=["all", 2], width=64, height=48, length=9, batch_size=1,
        start_image=["picture", 0],
    )  # fmt: skip
    entry = families.run(graph(loaders, ["all", 0], ["all", 1], ["all", 2], latent))
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    assert len(entry["outputs"]["save"]["images"]) == 9
    assert Image.open(io.BytesIO(families.picture(entry, "save"))).size == (64, 48)


def test_ltx_2_3_makes_a_video_with_its_sound(families: ServerProcess) -> None:
    name = {"ckpt_name": "ltx23.safetensors"}
    prompt = {
        "all": node("CheckpointLoaderSimple", **name),
        "clip": node(
            "LTXAVTextEncoderLoader", **name, text_encoder="gemma3_12b_te.safetensors",
            device="default",
        ),
        "sound": node("LTXVAudioVAELoader", **name),
        "text": node("CLIPTextEncode", text="a red cat", clip=["clip", 0]),
        "none": node("CLIPTextEncode", text="", clip=["clip", 0]),
        "told": node(
            "LTXVConditioning", positive=["text", 0], negative=["none", 0], frame_rate=24.0
        ),
        "frames": node("EmptyLTXVLatentVideo", width=96, height=64, length=9, batch_size=1),
        "silence": node(
            "LTXVEmptyLatentAudio", frames_number=9, frame_rate=24, batch_size=1,
            audio_vae=["sound", 0],
        ),
        "latent": node(
            "LTXVConcatAVLatent", video_latent=["frames", 0], audio_latent=["silence", 0]
        ),
        "guider": node(
            "LTXVDualCFGGuider", model=["all", 0], positive=["told", 0], negative=["told", 1],
            video_cfg=3.0, audio_cfg=7.0,
        ),
        "noise": node("RandomNoise", noise_seed=3),
        "euler": node("KSamplerSelect", sampler_name="euler"),
        "sigmas": node(
            "LTXVScheduler", steps=2, max_shift=2.05, base_shift=0.95, stretch=True, terminal=0.1,
            latent=["latent", 0],
        ),
        "run": node(
            "SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0],
            sampler=["euler", 0], sigmas=["sigmas", 0], latent_image=["latent", 0],
        ),
        "parts": node("LTXVSeparateAVLatent", av_latent=["run", 0]),
        "decode": node("VAEDecode", samples=["parts", 0], vae=["all", 2]),
        "heard": node("LTXVAudioVAEDecode", samples=["parts", 1], audio_vae=["sound", 0]),
        "video": node("CreateVideo", images=["decode", 0], fps=24.0, audio=["heard", 0]),
        "save": node(
            "SaveVideo", video=["video", 0], filename_prefix="ltx", format="mp4", codec="auto"
        ),
    }  # fmt: skip
    entry = families.run(prompt)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    with av.open(io.BytesIO(families.picture(entry, "save"))) as file:
        pictures, sound = file.streams.video[0], file.streams.audio[0]
        assert (pictures.width, pictures.height, pictures.frames) == (96, 64, 9)
        assert (sound.rate, sound.channels) == (48000, 2)  # the second vocoder's
        assert sum(frame.samples for frame in file.decode(sound)) >= 37 * 480


def test_stable_audio_makes_a_sound(families: ServerProcess) -> None:
    loaders = {
        "all": node("CheckpointLoaderSimple", ckpt_name="audio.safetensors"),
        "clip": one("audio", "stable_audio"),
        "told": node(
            "ConditioningStableAudio", positive=["text", 0], negative=["none", 0],
            seconds_start=0.0, seconds_total=2.0,
        ),
    }  # fmt: skip
    latent = node("EmptyLatentAudio", seconds=1.0, batch_size=1)
    prompt = graph(loaders, ["all", 0], ["clip", 0], ["all", 2], latent)
    prompt["run"]["inputs"] |= {"positive": ["told", 0], "negative": ["told", 1]}
    prompt["decode"] = node("VAEDecodeAudio", samples=["run", 0], vae=["all", 2])
    prompt["save"] = node("SaveAudio", audio=["decode", 0], filename_prefix="sound")
    entry = families.run(prompt)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    assert entry["outputs"]["save"]["audio"][0]["filename"].endswith(".flac")


def test_ace_step_makes_a_song_and_goes_on_from_one(families: ServerProcess) -> None:
    loaders = {"all": node("CheckpointLoaderSimple", ckpt_name="ace_step.safetensors")}
    latent = node("EmptyAceStepLatentAudio", seconds=1.0, batch_size=1)
    prompt = graph(loaders, ["all", 0], ["all", 1], ["all", 2], latent)
    prompt["text"] = node(
        "TextEncodeAceStepAudio", clip=["all", 1], tags="a red cat", lyrics="[verse]\nla la",
        lyrics_strength=0.9,
    )  # fmt: skip
    prompt["none"] = node("ConditioningZeroOut", conditioning=["text", 0])
    prompt["decode"] = node("VAEDecodeAudio", samples=["run", 0], vae=["all", 2])
    prompt["save"] = node("SaveAudioMP3", audio=["decode", 0], filename_prefix="song", quality="V0")
    prompt["heard"] = node("VAEEncodeAudio", audio=["decode", 0], vae=["all", 2])
    prompt["again"] = node("KSampler", **prompt["run"]["inputs"])
    prompt["again"]["inputs"] |= {"latent_image": ["heard", 0], "denoise": 0.5}
    prompt["second"] = node("VAEDecodeAudio", samples=["again", 0], vae=["all", 2])
    prompt["kept"] = node("SaveAudio", audio=["second", 0], filename_prefix="song")
    entry = families.run(prompt)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    assert entry["outputs"]["save"]["audio"][0]["filename"].endswith(".mp3")
    assert entry["outputs"]["kept"]["audio"][0]["filename"].endswith(".flac")


def test_ace_step15_makes_a_song_of_codes_that_its_writer_chose(families: ServerProcess) -> None:
    loaders = {
        "net": node("UNETLoader", unet_name="ace15.safetensors", weight_dtype="default"),
        "clip": node("DualCLIPLoader", clip_name1="ace15/small.safetensors",
                     clip_name2="ace15/writer.safetensors", type="ace"),
        "vae": node("VAELoader", vae_name="ace15.safetensors"),
        "shift": node("ModelSamplingAuraFlow", model=["net", 0], shift=3.0),
    }  # fmt: skip
    latent = node("EmptyAceStep1.5LatentAudio", seconds=1.0, batch_size=1)
    prompt = graph(loaders, ["shift", 0], ["clip", 0], ["vae", 0], latent)
    prompt["text"] = node(
        "TextEncodeAceStepAudio1.5", clip=["clip", 0], tags="a red cat", lyrics="[verse]\nla la",
        seed=31, bpm=190, duration=1.0, timesignature="4", language="en", keyscale="E minor",
        generate_audio_codes=True, cfg_scale=2.0, temperature=0.85, top_p=0.9, top_k=0, min_p=0.0,
    )  # fmt: skip
    prompt["none"] = node("ConditioningZeroOut", conditioning=["text", 0])
    prompt["decode"] = node("VAEDecodeAudio", samples=["run", 0], vae=["vae", 0])
    prompt["save"] = node("SaveAudioMP3", audio=["decode", 0], filename_prefix="song", quality="V0")
    entry = families.run(prompt)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    assert entry["outputs"]["save"]["audio"][0]["filename"].endswith(".mp3")


def test_stable_cascade_makes_a_picture_in_two_stages(families: ServerProcess) -> None:
    loaders = {
        "c": node("CheckpointLoaderSimple", ckpt_name="stage_c.safetensors"),
        "b": node("CheckpointLoaderSimple", ckpt_name="stage_b.safetensors"),
        "prior": node("StableCascade_StageB_Conditioning", conditioning=["text", 0],
                      stage_c=["first", 0]),
    }  # fmt: skip
    latent = node(
        "StableCascade_EmptyLatentImage", width=256, height=256, compression=42, batch_size=1
    )
    prompt = graph(loaders, ["b", 0], ["c", 1], ["b", 2], latent)
    prompt["first"] = node(
        "KSampler", **RUN, model=["c", 0], positive=["text", 0], negative=["none", 0],
        latent_image=["latent", 0],
    )  # fmt: skip
    prompt["run"]["inputs"] |= {"positive": ["prior", 0], "latent_image": ["latent", 1]}
    assert picture_of(families, prompt).size == (256, 256)


def test_an_encoder_of_another_model_is_refused_by_name(families: ServerProcess) -> None:
    prompt = apart(
        one("lumina2", "lumina2"),
        empty("EmptySD3LatentImage"),
        "flux_small.safetensors",
        "omnigen2",
    )
    entry = families.run(prompt)
    kind, error = entry["status"]["messages"][-1]
    assert kind == "execution_error"
    assert error["node_id"] == "run"
    assert str(test_omnigen2.WIDTH) in error["exception_message"]


def test_hidream_refuses_the_states_of_another_encoder(families: ServerProcess) -> None:
    prompt = apart(
        one("cosmos", "cosmos"), empty("EmptySD3LatentImage"), "flux_small.safetensors", "hidream"
    )
    entry = families.run(prompt)
    _, error = entry["status"]["messages"][-1]
    assert error["node_id"] == "run"
    assert "it takes 24" in error["exception_message"]
