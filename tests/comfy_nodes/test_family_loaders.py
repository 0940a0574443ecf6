"""The loader, saver and merging nodes on small files of the transformer families."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import folder_paths
import nodes
from comfy import progress
from comfy.ldm.aura.mmdit import MMDiT
from comfy.ldm.chroma_radiance.model import ChromaRadiance
from comfy.ldm.cosmos.predict2 import MiniTrainDIT
from comfy.ldm.flux.model import Flux
from comfy.ldm.hunyuan3d.model import Hunyuan3Dv2
from comfy.ldm.hunyuan3dv2_1.hunyuandit import HunYuanDiTPlain
from comfy.ldm.hunyuan_video.model import HunyuanVideo
from comfy.ldm.kandinsky5.model import Kandinsky5
from comfy.ldm.lightricks.model import LTXVModel
from comfy.ldm.lumina.model import NextDiT
from comfy.ldm.omnigen.omnigen2 import OmniGen2Transformer2DModel
from comfy.ldm.pixart.pixartms import PixArtMS
from comfy_extras import nodes_model_merging as merging
from comfy_extras.nodes_hidream import QuadrupleCLIPLoader
from comfy_extras.nodes_sd3 import TripleCLIPLoader
from comfy_nodes import loaders
from tests.comfy.families import (
    test_auraflow,
    test_chroma_radiance,
    test_cosmos,
    test_flux2,
    test_hunyuan3d,
    test_hunyuan3d21,
    test_hunyuan_video,
    test_kandinsky5,
    test_ltxv,
    test_lumina2,
    test_omnigen2,
    test_pixart,
    test_qwen,
    test_transformers,
    test_wan,
)
from tests.support.golden_nets import read_golden_net

FOLDERS = ("checkpoints", "diffusion_models", "loras", "vae", "vae_approx", "text_encoders")
# Name -> network and its sizes, shape of a latent, width of the text.
SMALL: dict[str, tuple[Any, dict[str, Any], tuple[int, ...], int]] = {
    "flux2": (Flux, test_flux2.SIZES, (1, 32, 4, 6), 3 * test_flux2.WIDTH),
    "hunyuan_video": (
        HunyuanVideo,
        test_hunyuan_video.SIZES,
        (1, 16, 3, 4, 6),
        test_hunyuan_video.WIDTH,
    ),
    "ltxv": (LTXVModel, test_ltxv.SIZES, (1, 8, 3, 2, 3), test_ltxv.TEXT),
    "pixart": (PixArtMS, test_pixart.SIZES, (1, 4, 8, 8), test_pixart.TEXT),
    "hunyuan3d": (Hunyuan3Dv2, test_hunyuan3d.SIZES, (1, 64, 12), 64),
    "radiance": (ChromaRadiance, test_chroma_radiance.SIZES, (1, 3, 8, 8), 24),
    "hunyuan3d21": (HunYuanDiTPlain, test_hunyuan3d21.SIZES, (1, 64, 12), 48),
    "auraflow": (MMDiT, test_auraflow.SIZES, (1, 4, 6, 5), test_auraflow.WIDTH),
    "lumina2": (NextDiT, test_lumina2.SIZES, test_lumina2.SHAPE, test_lumina2.TEXT),
    "cosmos": (MiniTrainDIT, test_cosmos.SIZES, test_cosmos.SHAPE, test_cosmos.TEXT),
    "omnigen2": (
        OmniGen2Transformer2DModel,
        test_omnigen2.SIZES,
        test_omnigen2.SHAPE,
        test_omnigen2.WIDTH,
    ),
    "kandinsky5": (
        Kandinsky5,
        test_kandinsky5.PICTURE,
        test_kandinsky5.PICTURE_SHAPE,
        test_kandinsky5.TEXT,
    ),
}
FAMILIES = ("flux", "sd3", "wan", "qwen", "z_image", *SMALL)
STEPS = (3, 2, 1.0, "euler", "simple")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, golden_folder: Path) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("families")
    patch = pytest.MonkeyPatch()
    for name in FOLDERS:
        (root / name).mkdir()
        entry = ([str(root / name)], folder_paths.supported_pt_extensions)
        patch.setitem(folder_paths.folder_names_and_paths, name, entry)
    (root / "output").mkdir()
    patch.setattr(folder_paths, "output_directory", str(root / "output"))
    patch.setattr(progress, "PROGRESS_BAR_ENABLED", False)
    encoders = root / "text_encoders"
    test_transformers.pieces(encoders)
    test_transformers.write_encoders(encoders)
    test_qwen.pieces(encoders)
    save_file(test_wan.wan_text_encoder(), encoders / "umt5.safetensors")
    for name, kind in (("qwen25", test_qwen.qwen.QWEN25_7B), ("qwen3", test_qwen.qwen.QWEN3_4B)):
        save_file(test_qwen.text_encoder(kind, 32), encoders / f"{name}.safetensors")
    save_file(test_wan.wan_autoencoder(), root / "vae" / "wan.safetensors")
    save_file(test_transformers.autoencoder(), root / "vae" / "flux.safetensors")
    for name, net in (("flux", "flux"), ("sd3", "sd3_mmdit")):
        weights = read_golden_net(golden_folder / f"nets/{net}.safetensors").weights
        weights = {key: value.contiguous() for key, value in weights.items()}
        save_file(weights, root / "diffusion_models" / f"{name}.safetensors")
    for name, write in (
        ("wan", test_wan.wan_files),
        ("qwen", test_qwen.qwen_image_files),
        ("z_image", test_qwen.z_image_files),
    ):
        folder = tmp_path_factory.mktemp(name)
        file = Path(write(folder)["model"])
        file.rename(root / "diffusion_models" / f"{name}.safetensors")
    for name, (kind, sizes, _, _) in SMALL.items():
        weights = test_transformers.random_like(kind(**sizes), 4)
        weights = {key: value.contiguous() for key, value in weights.items()}
        save_file(weights, root / "diffusion_models" / f"{name}.safetensors")
    yield root
    patch.undo()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network(family: str, dtype: str = "default") -> Any:
    return loaders.UNETLoader().load_unet(f"{family}.safetensors", dtype)[0]


CONTEXT = {"flux": 24, "sd3": 24, "wan": 24, "qwen": 32, "z_image": 32}


def answer(model: Any, family: str, golden_folder: Path) -> Tensor:
    """Two steps of the family's network on fixed inputs."""
    generator = torch.Generator().manual_seed(5)
    options: dict[str, Any] = {}
    if family in ("flux", "sd3"):
        name = {"flux": "flux", "sd3": "sd3_mmdit"}[family]
        net = read_golden_net(golden_folder / f"nets/{name}.safetensors")
        context, options["pooled_output"] = net.inputs["context"][:1], net.inputs["y"][:1]
        model.model.latent_format.latent_channels = channels = 4  # as the recorded networks have
    elif family in SMALL:
        context = torch.randn(1, 6, SMALL[family][3], generator=generator)
        channels = SMALL[family][2][1]
        model.model.latent_format.latent_channels = channels
    else:
        context, channels = torch.randn(1, 6, CONTEXT[family], generator=generator), 16
    cond = [[context, options]]
    shape = (1, channels, 1, 8, 8) if family == "wan" else (1, channels, 8, 8)
    if family in SMALL:
        shape = SMALL[family][2]
    latent = {"samples": torch.zeros(shape)}
    samples: Tensor = nodes.common_ksampler(model, *STEPS, cond, cond, latent)[0]["samples"]
    return samples


@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_is_kept_in_the_chosen_type_and_answers_nearly_the_same(
    family: str, dtype: str, models: Path, golden_folder: Path
) -> None:
    whole = answer(network(family), family, golden_folder)
    model = network(family, dtype)
    kept = torch.float8_e5m2 if dtype.endswith("e5m2") else torch.float8_e4m3fn
    assert model.model.get_dtype() == kept
    small = answer(model, family, golden_folder)
    assert small.isfinite().all()
    assert (small - whole).std() < (1.0 if dtype.endswith("e5m2") else 0.6) * whole.std()


LORAS = {
    "flux": (
        "transformer.single_transformer_blocks.0.attn.to_q.lora_A",
        "lora_unet_single_blocks_0_linear1.lora_down",
        "diffusion_model.single_blocks.0.linear1.lora_A",
        "lora_transformer_single_transformer_blocks_0_attn_to_q.lora_down",
    ),
    "sd3": (
        "transformer.transformer_blocks.0.attn.to_q.lora_A",
        "lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down",
        "diffusion_model.joint_blocks.0.x_block.attn.qkv.lora_A",
        "base_model.model.transformer_blocks.0.attn.to_q.lora_A",
    ),
    "wan": (
        "diffusion_model.blocks.0.self_attn.q.lora_A",
        "lora_unet_blocks_0_self_attn_q.lora_down",
        "diffusion_model.blocks.0.cross_attn.o.lora_down",
    ),
    "qwen": (
        "transformer_blocks.0.attn.to_q.lora_A",
        "transformer.transformer_blocks.0.attn.to_q.lora_A",
        "lora_unet_transformer_blocks_0_attn_to_q.lora_down",
        "lycoris_transformer_blocks_0_attn_to_q.lora_down",
    ),
    "flux2": (
        "diffusion_model.double_blocks.0.img_attn.proj.lora_A",
        "lora_unet_double_blocks_0_txt_attn_proj.lora_down",
    ),
    "hunyuan_video": (
        "diffusion_model.double_blocks.0.img_attn.proj.lora_A",
        "lora_unet_double_blocks_0_img_attn_proj.lora_down",
        "transformer.double_blocks.0.img_attn_proj.lora_A",
    ),
    "ltxv": ("diffusion_model.transformer_blocks.0.attn1.to_q.lora_A",),
    "pixart": (
        "diffusion_model.blocks.0.attn.proj.lora_A",
        "transformer.transformer_blocks.0.attn1.to_out.0.lora_A",
    ),
    "radiance": (
        "diffusion_model.double_blocks.0.img_attn.proj.lora_A",
        "transformer.single_transformer_blocks.0.attn.to_q.lora_A",
        "lora_unet_single_blocks_1_linear1.lora_down",
    ),
    "hunyuan3d21": (
        "diffusion_model.blocks.0.attn1.to_q.lora_A",
        "lora_unet_blocks_5_moe_experts_3_net_0_proj.lora_down",
    ),
    "hunyuan3d": ("diffusion_model.double_blocks.0.img_attn.proj.lora_A",),
    "auraflow": (
        "transformer.joint_transformer_blocks.0.attn.to_q.lora_A",
        "lora_unet_single_layers_0_attn_w1o.lora_down",
    ),
    "lumina2": ("diffusion_model.layers.0.attention.out.lora_A",),
    "cosmos": ("diffusion_model.blocks.0.self_attn.q_proj.lora_A",),
    "omnigen2": (
        "layers.0.attn.to_q.lora_A",
        "lora_unet_layers_0_attn_to_out_0.lora_down",
    ),
    "kandinsky5": (
        "visual_transformer_blocks.0.self_attention.to_query.lora_A",
        "transformer.visual_transformer_blocks.0.cross_attention.to_key.lora_A",
    ),
    "z_image": (
        "diffusion_model.layers.0.attention.to_q.lora_A",
        "transformer.layers.0.attention.to_out.0.lora_A",
        "lora_unet_layers_0_attention_qkv.lora_down",
    ),
}
CASES = [(family, key) for family, keys in LORAS.items() for key in keys]
WIDTHS = {"flux": 32, "sd3": 64, "wan": 32, "qwen": 32, "z_image": 64}
WIDTHS |= {
    "auraflow": 512,
    "flux2": 32,
    "hunyuan_video": 32,
    "ltxv": 64,
    "pixart": 144,
    "radiance": 32,
    "hunyuan3d": 32,
    "hunyuan3d21": 64,
    "lumina2": 96,
    "cosmos": 48,
    "omnigen2": 72,
    "kandinsky5": 32,
}
TIMES = {"linear1": 5, "net_0_proj": 4, "attn_qkv": 3, "attn.qkv": 3, "attention_qkv": 3}


@pytest.mark.parametrize(("family", "key"), CASES)
def test_loras_of_every_layout_act_on_a_view(
    family: str, key: str, models: Path, golden_folder: Path
) -> None:
    width = WIDTHS[family]
    generator = torch.Generator().manual_seed(1)
    out = width * next((times for part, times in TIMES.items() if part in key), 1)
    up = key.replace("lora_A", "lora_B").replace("lora_down", "lora_up")
    lora = {
        f"{key}.weight": torch.randn(2, width, generator=generator) * 0.5,
        f"{up}.weight": torch.randn(out, 2, generator=generator) * 0.5,
    }
    save_file(lora, models / "loras" / "lora.safetensors")
    model = network(family)
    plain = answer(model, family, golden_folder)
    view, clip = loaders.LoraLoader().load_lora(model, None, "lora.safetensors", 1.0, 1.0)
    assert clip is None
    assert not torch.allclose(answer(view, family, golden_folder), plain)
    assert torch.equal(answer(model, family, golden_folder), plain)


def saved_files(root: Path) -> list[Path]:
    return sorted((root / "output").rglob("*.safetensors"), key=lambda file: file.stat().st_mtime)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_network_is_the_same_bit_by_bit(family: str, models: Path) -> None:
    merging.ModelSave().save(network(family), f"{family}_again")
    path = saved_files(models)[-1]
    original = load_file(models / "diffusion_models" / f"{family}.safetensors")
    again = load_file(path)
    root = "model.model." if family == "hunyuan_video" else "model.diffusion_model."
    assert {key.removeprefix(root) for key in again} == original.keys()
    for key, value in again.items():
        assert torch.equal(value, original[key.removeprefix(root)]), key
    path.rename(models / "diffusion_models" / f"{family}_again.safetensors")
    twice = network(f"{family}_again").model.diffusion_model.state_dict()
    once = network(family).model.diffusion_model.state_dict()
    assert twice.keys() == once.keys()
    assert all(torch.equal(twice[key], once[key]) for key in once)


@pytest.mark.parametrize("family", FAMILIES)
def test_merging_a_network_with_itself_changes_nothing(
    family: str, models: Path, golden_folder: Path
) -> None:
    model = network(family)
    merged = merging.ModelMergeSimple().merge(model, network(family), 0.5)[0]
    expected = answer(model, family, golden_folder)
    torch.testing.assert_close(answer(merged, family, golden_folder), expected)


@pytest.mark.parametrize("name", ["wan", "flux"])
def test_a_saved_autoencoder_is_the_same_bit_by_bit(name: str, models: Path) -> None:
    vae = loaders.VAELoader().load_vae(f"{name}.safetensors")[0]
    merging.VAESave().save(vae, f"vae_{name}")
    original, again = load_file(models / "vae" / f"{name}.safetensors"), saved_files(models)[-1]
    saved = {key.split("first_stage_model.")[-1]: value for key, value in load_file(again).items()}
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[key], original[key]) for key in saved)


@pytest.mark.parametrize(
    ("file", "kind"), [("umt5", "wan"), ("qwen25", "qwen_image"), ("qwen3", "lumina2")]
)
def test_a_saved_text_encoder_means_the_same(file: str, kind: str, models: Path) -> None:
    load = loaders.CLIPLoader().load_clip
    clip = load(f"{file}.safetensors", kind)[0]
    merging.CLIPSave().save(clip, f"clip_{file}")
    again = saved_files(models)[-1]
    again = again.rename(models / "text_encoders" / f"{file}_again.safetensors")
    twice = load(again.name, kind)[0]
    states = [one.encode_from_tokens_scheduled(one.tokenize("a red cat")) for one in (clip, twice)]
    assert torch.equal(states[0][0][0], states[1][0][0])


def test_several_encoders_at_once(models: Path) -> None:
    pair = ("clip_l.safetensors", "t5xxl.safetensors")
    flux = loaders.DualCLIPLoader().load_clip(*pair, "flux")[0]
    assert flux.encode_from_tokens_scheduled(flux.tokenize("a cat"))[0][0].shape == (1, 256, 24)
    with pytest.raises(ValueError, match=r"clip_l, clip_l, t5xxl for type sd3.*known"):
        TripleCLIPLoader.execute(pair[0], pair[0], pair[1])
    with pytest.raises(ValueError, match="umt5xxl, t5xxl for type"):
        loaders.DualCLIPLoader().load_clip("umt5.safetensors", pair[1], "sdxl")
    with pytest.raises(ValueError, match="hidream cannot be loaded"):
        QuadrupleCLIPLoader.execute(*pair, "umt5.safetensors", "qwen3.safetensors")
