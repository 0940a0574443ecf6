"""FLUX and Stable Diffusion 3 from file to picture: small networks load, answer as recorded,
sample, and are saved again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from comfy import loading, text_loading
from comfy.families import unsupported
from comfy.families.model_type import ModelType
from comfy.ldm.autoencoder.kl import AutoencoderKL
from comfy.ldm.autoencoder.layers import AutoencoderConfig
from comfy.saving import save_checkpoint
from comfy.text_encoders import t5_pieces
from comfy.weights.fill import IncompleteWeightsError
from comfy_nodes.sampling import common_ksampler
from tests.comfy.text_encoders.test_sentencepiece_file import piece_file
from tests.support.golden_nets import GoldenNet, assert_close_to_golden, read_golden_net

NETS = {
    "flux": ("Flux", ModelType.FLUX),
    "flux_schnell": ("FluxSchnell", ModelType.FLOW),
    "sd3_mmdit": ("SD3", ModelType.FLOW),
    "sd35_medium_mmdit": ("SD3", ModelType.FLOW),
    "sd35_mmdit_rms": ("SD3", ModelType.FLOW),
}


def golden(folder: Path, name: str) -> GoldenNet:
    return read_golden_net(folder / f"nets/{name}.safetensors")


def write_network(net: GoldenNet, path: Path, prefix: str = "") -> str:
    save_file({prefix + key: value.contiguous() for key, value in net.weights.items()}, path)
    return str(path)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("name", NETS)
@torch.inference_mode()
def test_a_small_network_loads_and_answers_as_recorded(
    name: str, prefix: str, golden_folder: Path, tmp_path: Path
) -> None:
    net = golden(golden_folder, name)
    patcher = loading.load_diffusion_model(write_network(net, tmp_path / "net.safetensors", prefix))
    model = patcher.model
    family, model_type = NETS[name]
    assert type(model.model_config).__name__ == family
    assert model.model_type is model_type
    # Steps count with the recorded times: what the network receives is the sampling's timestep.
    args = {key.partition("/")[2] or key: value for key, value in net.inputs.items()}
    args = {
        key: value for key, value in args.items() if key in ("x", "t", "context", "y", "guidance")
    }
    got = model.diffusion_model(args.pop("x"), args.pop("t"), **args)
    assert_close_to_golden(got, net.outputs["out"])


def test_the_flow_models_have_their_shifts(golden_folder: Path, tmp_path: Path) -> None:
    shifts = {"flux": 1.15, "flux_schnell": 1.0, "sd3_mmdit": 3.0}
    for name, shift in shifts.items():
        path = write_network(golden(golden_folder, name), tmp_path / f"{name}.safetensors")
        sampling = loading.load_diffusion_model(path).get_model_object("model_sampling")
        assert sampling.shift == shift
        assert float(sampling.sigma_max) == pytest.approx(1.0)


def pieces(folder: Path, name: str = "t5_tokenizer.json") -> None:
    """A vocabulary of T5's kind with a few words."""
    words = ["<pad>", "</s>", "<unk>", "\u2581", "\u2581a", "\u2581red", "\u2581cat", "c", "a", "t"]
    scores = [(word, -float(number)) for number, word in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(folder / name))


def random_like(module: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(value.shape, generator=generator) / max(1, value.shape[-1]) ** 0.5
        if value.ndim > 1
        else torch.ones(value.shape)
        for key, value in module.state_dict().items()
        if value.is_floating_point()
    }


def autoencoder() -> dict[str, Tensor]:
    """A 16-channel autoencoder without the inner convolutions, as FLUX and SD3 have it."""
    sizes = AutoencoderConfig(
        ch=32, ch_mult=(1, 1, 1, 1), num_res_blocks=1, z_channels=16, norm_num_groups=32
    )
    return random_like(AutoencoderKL(sizes, None), 5)


def text_encoders(width: int) -> dict[str, dict[str, Tensor]]:
    """A CLIP ViT-L and a T5 with small widths, by name."""
    from comfy.ldm.clip.text import CLIPTextModel
    from comfy.ldm.t5.model import T5
    from comfy.ops import manual_cast

    clip = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 1, "vocab_size": 49408,
    }  # fmt: skip
    t5 = {
        "d_model": width,
        "d_kv": 8,
        "d_ff": 32,
        "num_heads": 2,
        "num_layers": 2,
        "vocab_size": 40,
    }
    return {
        "clip_l": random_like(CLIPTextModel(clip, None, "cpu", manual_cast), 6),
        "t5xxl": random_like(T5(t5, None, "cpu", manual_cast), 7),
    }


def flux_checkpoint(folder: Path, golden_folder: Path) -> Path:
    """A whole FLUX checkpoint of small parts."""
    from comfy.ldm.flux.model import Flux

    del golden_folder
    network = Flux(
        in_channels=16, out_channels=16, vec_in_dim=64, context_in_dim=24, hidden_size=32,
        mlp_ratio=2.0, num_heads=2, depth=1, depth_single_blocks=1, axes_dim=[4, 6, 6],
        theta=10000, patch_size=2, qkv_bias=True, guidance_embed=True,
    )  # fmt: skip
    tensors = {f"model.diffusion_model.{k}": v for k, v in random_like(network, 4).items()}
    tensors |= {f"vae.{k}": v for k, v in autoencoder().items()}
    for name, weights in text_encoders(24).items():
        tensors |= {f"text_encoders.{name}.transformer.{k}": v for k, v in weights.items()}
    path = folder / "flux.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return path


def sampled(model: Any, clip: Any, channels: int = 16) -> Tensor:
    positive = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    negative = clip.encode_from_tokens_scheduled(clip.tokenize(""))
    latent = {"samples": torch.zeros(1, channels, 8, 8)}
    out = common_ksampler(model, 7, 2, 1.0, "euler", "simple", positive, negative, latent)
    return out[0]["samples"]


def test_a_flux_checkpoint_goes_from_text_to_picture_and_survives_saving(
    golden_folder: Path, tmp_path: Path
) -> None:
    pieces(tmp_path)
    path = flux_checkpoint(tmp_path, golden_folder)
    found = loading.load_checkpoint_guess_config(str(path))
    assert type(found.model.model.model_config).__name__ == "Flux"
    latent = sampled(found.model, found.clip)
    picture = found.vae.decode(latent)
    assert picture.shape == (1, 64, 64, 3)
    assert picture.isfinite().all()
    again_path = tmp_path / "again.safetensors"
    save_checkpoint(str(again_path), found.model, found.clip, found.vae)
    again = loading.load_checkpoint_guess_config(str(again_path))
    assert torch.equal(sampled(again.model, again.clip), latent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_t5_of_a_checkpoint_keeps_the_files_number_type(
    dtype: torch.dtype, golden_folder: Path, tmp_path: Path
) -> None:
    pieces(tmp_path)
    path = flux_checkpoint(tmp_path, golden_folder)
    tensors = load_file(path)
    small = {k: v.to(dtype) if ".t5xxl." in k else v for k, v in tensors.items()}
    save_file(small, path)
    clip = loading.load_checkpoint_guess_config(str(path), output_model=False).clip
    assert clip is not None
    t5 = clip.cond_stage_model.t5xxl.transformer
    assert t5.shared.weight.dtype == dtype
    [[cond, _]] = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    assert cond.isfinite().all()


def test_without_a_vocabulary_the_error_says_what_to_fetch(
    golden_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(t5_pieces, "PACKAGE", "a_package_nobody_has")
    path = flux_checkpoint(tmp_path, golden_folder)
    with pytest.raises(FileNotFoundError, match=r"word pieces of T5.*models/text_encoders"):
        loading.load_checkpoint_guess_config(str(path))
    # The parts that need none load all the same.
    alone = loading.load_checkpoint_guess_config(str(path), output_clip=False)
    assert alone.clip is None
    assert alone.model is not None


def write_encoders(folder: Path) -> dict[str, str]:
    paths = {}
    for name, weights in text_encoders(24).items():
        paths[name] = str(folder / f"{name}.safetensors")
        save_file({key: value.contiguous() for key, value in weights.items()}, paths[name])
    return paths


def test_a_pair_of_files_is_the_text_encoder_of_flux(tmp_path: Path) -> None:
    pieces(tmp_path, "tokenizer.json")
    paths = write_encoders(tmp_path)
    clip = text_loading.load_clip(
        [paths["t5xxl"], paths["clip_l"]], clip_type=text_loading.CLIPType.FLUX
    )
    tokens = clip.tokenize("a red cat")
    assert [token for token, _ in tokens["t5xxl"][0][:4]] == [4, 5, 6, 1]
    assert len(tokens["t5xxl"][0]) == 256
    [[cond, options]] = clip.encode_from_tokens_scheduled(tokens)
    assert cond.shape == (1, 256, 24)
    assert options["pooled_output"].shape == (1, 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_t5_in_a_small_number_type_stays_small_and_means_nearly_the_same(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    pieces(tmp_path)
    paths = write_encoders(tmp_path)
    flux = text_loading.CLIPType.FLUX

    def states() -> tuple[Any, Tensor]:
        clip = text_loading.load_clip([paths["clip_l"], paths["t5xxl"]], clip_type=flux)
        [[cond, _]] = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
        return clip, cond

    _, whole = states()
    small = {key: value.to(dtype) for key, value in load_file(paths["t5xxl"]).items()}
    save_file(small, paths["t5xxl"])
    clip, cond = states()
    weight = clip.cond_stage_model.t5xxl.transformer.shared.weight
    assert weight.dtype == dtype
    assert (cond - whole).std() < 0.2 * whole.std()


def test_a_vocabulary_in_the_folder_of_text_encoders_is_found(tmp_path: Path) -> None:
    shared, own = tmp_path / "text_encoders", tmp_path / "elsewhere"
    shared.mkdir()
    own.mkdir()
    pieces(shared)
    paths = write_encoders(own)
    options = {loading.FOLDERS_OPTION: [str(shared)]}
    both = [paths["t5xxl"], paths["clip_l"]]
    clip = text_loading.load_clip(both, clip_type=text_loading.CLIPType.FLUX, model_options=options)
    assert clip.tokenize("cat")["t5xxl"][0][0][0] == 6


def test_a_vocabulary_inside_the_encoder_is_used_and_is_no_weight(tmp_path: Path) -> None:
    paths = write_encoders(tmp_path)
    inside = {**load_file(paths["t5xxl"]), "spiece_model": vocabulary()}
    save_file(inside, paths["t5xxl"])
    both = [paths["clip_l"], paths["t5xxl"]]
    clip = text_loading.load_clip(both, clip_type=text_loading.CLIPType.FLUX)
    assert clip.tokenize("red cat")["t5xxl"][0][:2] == [(5, 1.0), (6, 1.0)]
    assert not any("spiece" in key for key in clip.get_sd())


def vocabulary() -> Tensor:
    return torch.tensor(list(piece_file()), dtype=torch.uint8)


def test_sd3_takes_the_encoders_there_are(tmp_path: Path) -> None:
    """CLIP alone needs no vocabulary of T5; T5 alone has no pooled text of CLIP."""
    paths = write_encoders(tmp_path)
    sd3 = text_loading.CLIPType.SD3
    clip = text_loading.load_clip([paths["clip_l"]], clip_type=sd3)
    assert clip.cond_stage_model.t5xxl is None
    assert clip.tokenize("a cat")["t5xxl"] == []
    pieces(tmp_path)
    both = text_loading.load_clip([paths["clip_l"], paths["t5xxl"]], clip_type=sd3)
    assert both.cond_stage_model.clip_g is None
    assert len(both.tokenize("a cat")["t5xxl"][0]) == 77


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["t5xxl", "t5xxl"], text_loading.CLIPType.FLUX),
        (["clip_l", "clip_l"], text_loading.CLIPType.SD3),
        (["t5xxl"], text_loading.CLIPType.WAN),
        (["clip_l", "t5xxl"], text_loading.CLIPType.HUNYUAN_VIDEO),
    ],
)
def test_encoders_that_do_not_go_together_are_refused_with_what_does(
    names: list[str], kind: text_loading.CLIPType, tmp_path: Path
) -> None:
    pieces(tmp_path)
    paths = write_encoders(tmp_path)
    with pytest.raises(ValueError, match=rf"for type {kind.name.lower()} cannot.*type flux"):
        text_loading.load_clip([paths[name] for name in names], clip_type=kind)


def test_encoders_of_other_families_are_told_by_name(tmp_path: Path) -> None:
    for key, name in text_loading.UNSUPPORTED_MARKS:
        path = tmp_path / "te.safetensors"
        save_file({key: torch.zeros(4)}, path)
        with pytest.raises(loading.UnknownArchitectureError, match=rf"as {name}.*cannot run"):
            text_loading.load_clip([str(path)])


def test_a_network_of_a_family_that_is_not_here_is_told_by_name(tmp_path: Path) -> None:
    for marks, name in unsupported.NETWORKS:
        assert unsupported.name_of(dict.fromkeys(marks), "") == name
    path = tmp_path / "network.safetensors"
    save_file({"distilled_guidance_layer.0.norms.0.scale": torch.zeros(2)}, path)
    with pytest.raises(
        loading.UnknownArchitectureError,
        match=r"recognised as Chroma, in an early layout, which this version cannot run yet",
    ):
        loading.load_diffusion_model(str(path))


def test_a_header_may_not_lie_about_a_head(golden_folder: Path, tmp_path: Path) -> None:
    net = golden(golden_folder, "flux")
    key = "double_blocks.0.img_attn.norm.key_norm.scale"
    net.weights[key] = torch.ones(12)
    with pytest.raises((IncompleteWeightsError, loading.BrokenCheckpointError), match="12"):
        loading.load_diffusion_model(write_network(net, tmp_path / "net.safetensors"))
    assert json.dumps(net.constructor)


@torch.inference_mode()
def test_a_lora_in_the_librarys_names_changes_a_view_only(
    golden_folder: Path, tmp_path: Path
) -> None:
    net = golden(golden_folder, "flux")
    patcher = loading.load_diffusion_model(write_network(net, tmp_path / "net.safetensors"))
    patcher.model.latent_format.latent_channels = 4  # as the recorded network has them
    generator = torch.Generator().manual_seed(1)
    root = "transformer.single_transformer_blocks.0.attn.to_k"
    lora = {
        f"{root}.lora_A.weight": torch.randn(2, 32, generator=generator),
        f"{root}.lora_B.weight": torch.randn(32, 2, generator=generator),
    }
    view, _ = loading.load_lora_for_models(patcher, None, lora, 1.0, 0.0)
    assert view is not None
    latent = {"samples": torch.zeros(1, 4, 8, 8)}
    cond = [[net.inputs["context"][:1], {"pooled_output": net.inputs["y"][:1]}]]

    def run(model: Any) -> Tensor:
        out = common_ksampler(model, 3, 2, 1.0, "euler", "simple", cond, cond, latent)
        return out[0]["samples"]

    plain = run(patcher)
    assert not torch.allclose(run(view), plain)
    assert torch.equal(run(patcher), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@torch.inference_mode()
def test_files_in_small_number_types_sample_nearly_the_same(
    dtype: torch.dtype, golden_folder: Path, tmp_path: Path
) -> None:
    net = golden(golden_folder, "flux")
    cond = [[net.inputs["context"][:1], {"pooled_output": net.inputs["y"][:1]}]]
    latent = {"samples": torch.zeros(1, 4, 8, 8)}

    def run(name: str) -> Tensor:
        path = write_network(net, tmp_path / f"{name}.safetensors")
        model = loading.load_diffusion_model(path)
        model.model.latent_format.latent_channels = 4  # as the recorded network has them
        steps = (model, 3, 2, 1.0, "euler", "simple")
        return common_ksampler(*steps, cond, cond, latent)[0]["samples"]

    whole = run("whole")
    net.weights = {key: value.to(dtype) for key, value in net.weights.items()}
    small = run("small")
    assert small.isfinite().all()
    # Three bits of mantissa leave an error of 1/16 a weight.
    assert (small - whole).std() < 0.2 * whole.std()


@torch.inference_mode()
def test_latents_of_videos_are_refused_where_pictures_are_made(
    golden_folder: Path, tmp_path: Path
) -> None:
    pieces(tmp_path)
    found = loading.load_checkpoint_guess_config(str(flux_checkpoint(tmp_path, golden_folder)))
    [[text, told]] = found.clip.encode_from_tokens_scheduled(found.clip.tokenize("a red cat"))

    def run(latent: Tensor, **options: Any) -> None:
        cond = [[text, {**told, **options}]]
        steps = (found.model, 7, 1, 1.0, "euler", "simple", cond, cond)
        common_ksampler(*steps, {"samples": latent})

    with pytest.raises(ValueError, match=r"takes latents of 4 axes .* found one of 5, \(1, 16, 3"):
        run(torch.rand(1, 16, 3, 8, 6))
    with pytest.raises(ValueError, match=r"reference_latents: expected .* 4 axes, as Flux"):
        run(torch.rand(1, 16, 8, 6), reference_latents=[torch.rand(1, 16, 1, 8, 6)])
