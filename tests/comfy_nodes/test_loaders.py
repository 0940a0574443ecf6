"""The nodes of the main job, chained as in a graph, on a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import folder_paths
import nodes
from comfy import loading, progress
from comfy.sampling.parameterisation import V_PREDICTION
from comfy.weights import errors
from tests.support import tiny_checkpoint

FOLDERS = ("checkpoints", "configs", "loras", "vae", "vae_approx", "embeddings", "text_encoders")
LORA = "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder per category, with a checkpoint, a LoRA that fits and one that does not."""
    root = tmp_path_factory.mktemp("models")
    patch = pytest.MonkeyPatch()
    for name in FOLDERS:
        (root / name).mkdir()
        suffixes = {".yaml"} if name == "configs" else folder_paths.supported_pt_extensions
        entry = ([str(root / name)], suffixes)
        patch.setitem(folder_paths.folder_names_and_paths, name, entry)
    patch.setattr(progress, "PROGRESS_BAR_ENABLED", False)
    tiny_checkpoint.write(root / "checkpoints" / "tiny.safetensors")
    for file, key in (("fits", LORA), ("foreign", "lora_unet_double_blocks_0_img_attn_qkv")):
        tensors = {
            f"{key}.lora_down.weight": torch.ones(2, 32),
            f"{key}.lora_up.weight": torch.ones(32, 2),
        }
        save_file(tensors, root / "loras" / f"{file}.safetensors")
    yield root
    patch.undo()


@pytest.fixture(scope="module")
def loaded(models: Path) -> tuple[Any, Any, Any]:
    return nodes.CheckpointLoaderSimple().load_checkpoint("tiny.safetensors")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def encode(clip: Any, text: str) -> Any:
    return nodes.CLIPTextEncode().encode(clip, text)[0]


def sample(model: Any, clip: Any, latent: Any = None, **options: Any) -> torch.Tensor:
    latent = latent or nodes.EmptyLatentImage().generate(64, 64)[0]
    texts = (encode(clip, "a red circle"), encode(clip, ""))
    made = nodes.KSampler().sample(model, 1, 3, 4.0, "euler", "normal", *texts, latent, **options)
    return made[0]["samples"]


def test_text_becomes_a_picture(loaded: Any) -> None:
    model, clip, vae = loaded
    latent = sample(model, clip)
    picture = nodes.VAEDecode().decode(vae, {"samples": latent})[0]
    assert picture.shape == (1, 64, 64, 3)
    assert 0 <= picture.min() <= picture.max() <= 1


def test_the_same_seed_gives_the_same_latent_and_another_seed_another(loaded: Any) -> None:
    model, clip, _ = loaded
    texts = (encode(clip, "a"), encode(clip, ""))
    latent = nodes.EmptyLatentImage().generate(64, 64)[0]

    def run(seed: int) -> torch.Tensor:
        made = nodes.KSampler().sample(model, seed, 2, 4.0, "euler", "normal", *texts, latent)
        return made[0]["samples"]

    assert torch.equal(run(5), run(5))
    assert not torch.equal(run(5), run(6))


def test_two_halves_of_the_schedule_make_the_whole(loaded: Any) -> None:
    model, clip, _ = loaded
    texts = (encode(clip, "a"), encode(clip, "b"))
    latent = nodes.EmptyLatentImage().generate(64, 64)[0]
    common = (9, 4, 4.0, "euler", "karras", *texts)
    advanced = nodes.KSamplerAdvanced().sample
    half = advanced(model, "enable", *common, latent, 0, 2, "enable")[0]
    both = advanced(model, "disable", *common, half, 2, 10000, "disable")[0]
    whole = nodes.KSampler().sample(model, *common, latent)[0]
    torch.testing.assert_close(both["samples"], whole["samples"], rtol=1e-4, atol=1e-5)


def test_a_noise_mask_keeps_what_it_does_not_cover(loaded: Any) -> None:
    model, clip, vae = loaded
    latent = nodes.VAEEncode().encode(vae, torch.rand(1, 64, 64, 3))[0]
    mask = torch.zeros(64, 64)
    mask[:, 32:] = 1
    masked = nodes.SetLatentNoiseMask().set_mask(latent, mask)[0]
    made = sample(model, clip, masked)
    torch.testing.assert_close(made[..., :4], latent["samples"][..., :4], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(made[..., 4:], latent["samples"][..., 4:], atol=0.1)


def test_a_later_clip_layer_changes_the_text_and_not_the_original(loaded: Any) -> None:
    _, clip, _ = loaded
    before = encode(clip, "a red circle")[0][0]
    earlier = nodes.CLIPSetLastLayer().set_last_layer(clip, -2)[0]
    assert not torch.equal(encode(earlier, "a red circle")[0][0], before)
    assert torch.equal(encode(clip, "a red circle")[0][0], before)


def test_a_lora_changes_the_result_by_its_strength_and_can_be_left_out_again(loaded: Any) -> None:
    model, clip, _ = loaded
    plain = sample(model, clip)
    load = nodes.LoraLoader().load_lora
    changed = sample(*load(model, clip, "fits.safetensors", 1.0, 1.0))
    assert not torch.allclose(changed, plain, atol=1e-3)
    assert torch.equal(sample(model, clip), plain)
    assert load(model, clip, "fits.safetensors", 0, 0) == (model, clip)
    only = nodes.LoraLoaderModelOnly().load_lora_model_only(model, "fits.safetensors", 1.0)[0]
    assert torch.equal(sample(only, clip), changed)


def test_a_lora_that_fits_nothing_is_an_error_that_names_it(loaded: Any) -> None:
    model, clip, _ = loaded
    with pytest.raises(errors.NoMatchingWeightsError, match=r"foreign\.safetensors"):
        nodes.LoraLoader().load_lora(model, clip, "foreign.safetensors", 1.0, 1.0)


def test_a_lora_file_is_read_once_per_node(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, clip, _ = loaded
    node = nodes.LoraLoader()
    first = node.load_lora(model, clip, "fits.safetensors", 1.0, 1.0)
    monkeypatch.setattr("comfy_nodes.loaders.load_torch_file", None)
    again = node.load_lora(model, clip, "fits.safetensors", 1.0, 1.0)
    assert torch.equal(sample(*again), sample(*first))


def test_a_configuration_adds_prediction_type_and_text_layer(models: Path, loaded: Any) -> None:
    text = """
model:
  params:
    parameterization: v
    cond_stage_config: {params: {layer: hidden, layer_idx: -2}}
"""
    (models / "configs" / "v.yaml").write_text(text, encoding="utf-8")
    model, clip, vae = nodes.CheckpointLoader().load_checkpoint("v.yaml", "tiny.safetensors")
    sampling = model.get_model_object("model_sampling")
    assert isinstance(sampling, V_PREDICTION)
    assert clip.layer_idx == -2
    assert vae is not None


def test_an_absent_file_is_named_with_the_places_that_were_searched(models: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'gone\.safetensors'.*checkpoints"):
        nodes.CheckpointLoaderSimple().load_checkpoint("gone.safetensors")


def test_a_name_from_outside_the_folders_is_not_followed(models: Path) -> None:
    (models / "secret.safetensors").write_bytes(b"secret")
    with pytest.raises(FileNotFoundError):
        nodes.CheckpointLoaderSimple().load_checkpoint("../secret.safetensors")


def test_an_autoencoder_is_loaded_from_a_file_of_its_own(models: Path, loaded: Any) -> None:
    prefix = "first_stage_model."
    tensors = tiny_checkpoint.weights()
    alone = {key[len(prefix) :]: tensors[key] for key in tensors if key.startswith(prefix)}
    tiny_checkpoint.write(models / "vae" / "alone.safetensors", alone)
    vae = nodes.VAELoader().load_vae("alone.safetensors")[0]
    latent = torch.zeros(1, 4, 4, 4)
    assert torch.equal(vae.decode(latent), loaded[2].decode(latent))


def test_the_pixel_space_is_an_autoencoder_that_changes_nothing(models: Path) -> None:
    vae = nodes.VAELoader().load_vae("pixel_space")[0]
    pixels = torch.rand(1, 8, 8, 3)
    torch.testing.assert_close(vae.decode(vae.encode(pixels)), pixels)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("some.weight", r"1 key \(some\.weight\)\. To mend it: choose a file that holds an auto"),
        ("lora_unet_x.lora_down.weight", r"looks like a LoRA, which belongs in models/loras\. To"),
        ("model.diffusion_model.x", r"a diffusion model, which belongs in models/diffusion_model"),
        ("vocoder.activation_post.downsample.lowpass.filter", r"of MMAudio.*: choose a"),
    ],
)
def test_a_file_without_an_autoencoder_says_what_it_is(key: str, told: str, models: Path) -> None:
    save_file({key: torch.zeros(1)}, models / "vae" / "none.safetensors")
    with pytest.raises(loading.UnknownArchitectureError, match=rf"none\.safetensors: .*{told}"):
        nodes.VAELoader().load_vae("none.safetensors")


def test_an_approximation_is_offered_only_when_both_parts_are_there(models: Path) -> None:
    folder = models / "vae_approx"
    (folder / "taesd_encoder.safetensors").touch()
    assert "taesd" not in nodes.VAELoader.vae_list()
    with pytest.raises(FileNotFoundError, match=r"taesd_decoder\.safetensors"):
        nodes.VAELoader().load_vae("taesd")
    (folder / "taesd_decoder.safetensors").touch()
    assert "taesd" in nodes.VAELoader.vae_list()


def test_inpainting_nodes_fit_picture_and_mask_to_cells(loaded: Any) -> None:
    _, clip, vae = loaded
    pixels, mask = torch.rand(1, 70, 68, 3), torch.zeros(1, 35, 34)
    mask[:, 10:20, 10:20] = 1
    latent = nodes.VAEEncodeForInpaint().encode(vae, pixels, mask, 6)[0]
    assert latent["samples"].shape[-2:] == (8, 8)
    assert latent["noise_mask"].shape == (1, 1, 64, 64)
    text = encode(clip, "x")
    positive, negative, whole = nodes.InpaintModelConditioning().encode(
        text, text, pixels, vae, mask
    )
    for made in (positive, negative):
        assert made[0][1]["concat_latent_image"].shape == (1, 4, 8, 8)
        assert made[0][1]["concat_mask"].shape == (1, 1, 64, 64)
    assert "noise_mask" in whole


def test_tiles_give_about_the_same_picture(loaded: Any) -> None:
    _, _, vae = loaded
    generator = torch.Generator().manual_seed(0)
    latent = {"samples": torch.randn(1, 4, 16, 16, generator=generator)}
    whole = nodes.VAEDecode().decode(vae, latent)[0]
    tiled = nodes.VAEDecodeTiled().decode(vae, latent, 64, 16)[0]
    assert tiled.shape == whole.shape
    assert (tiled - whole).abs().mean() < 0.1  # each tile has group norms of its own
