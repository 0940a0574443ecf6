"""Small autoencoders of videos: recorded facts, answers of another implementation, pieces, the past
and no future, and what a person sees of them at the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import folder_paths
import nodes
from comfy import latent_formats, progress
from comfy.ldm.taesd import video
from comfy.ldm.taesd.video import TAEHV
from comfy.saving import autoencoder_hints
from comfy.vae.kinds import detect_autoencoder
from comfy.vae.taehv_kinds import NAME_HINT, TRAINED, taehv_memory
from comfy.vae.vae import VAE
from comfy.weights.errors import WeightFileError
from comfy.weights.fill import IncompleteWeightsError
from tests.comfy.families import key_shapes
from tests.support.formula_weights import fill_by_formula

RECORDED = {
    "TAEHV (HunyuanVideo, fp16 file)": "taehv",
    "light TAE Wan2.1 (non fp16)": "lighttaew2_1",
    "light TAE HunyuanVideo 1.5": "lighttaehy1_5",
    "light TAE Wan2.2": "lighttaew2_2",
}


@pytest.fixture(autouse=True)
def inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress, "PROGRESS_BAR_ENABLED", False)
    with torch.inference_mode():
        yield


def narrow(channels: int = 16, patch: int = 1) -> TAEHV:
    """A network of the real shape with few channels, its weights far from zero."""
    network = TAEHV(channels, patch_size=patch, widths=(16, 8, 8, 8), encoder_width=8)
    fill_by_formula(network.state_dict())
    return network


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recorded_as", RECORDED)
def test_recorded_shapes_and_facts_are_met(
    recorded_as: str, golden_folder: Path, golden_json: Callable[[str], Any]
) -> None:
    fact = golden_json("vae_detection.json")[recorded_as]
    weights = key_shapes.expand(key_shapes.recorded(golden_folder)["vaes"][recorded_as])
    if "fp16" in recorded_as.partition("non")[0]:
        weights = {key: value.half() for key, value in weights.items()}
    spec = detect_autoencoder(weights)
    assert spec is not None
    assert spec.header == {NAME_HINT: RECORDED[recorded_as]}
    built = spec.build(device="meta").state_dict()
    assert {k: v.shape for k, v in built.items()} == {k: v.shape for k, v in weights.items()}
    for name in ("latent_channels", "latent_dim", "output_channels", "not_video", "crop_input"):
        assert getattr(spec, name) == fact[name]
    for name in ("downscale_ratio", "upscale_ratio"):
        frames, *space = getattr(spec, name)
        assert space == fact[name]["spatial"]
        made = [frames(count) for count in (1, 2, 5, 9, 17, 33)]
        assert made == fact[name]["time_fn_at_1_2_5_9_17_33"]
    formulas = [list(spec.downscale_index_formula or ()), list(spec.upscale_index_formula or ())]
    assert formulas == fact["index_formulas"]
    assert [str(one)[6:] for one in spec.working_dtypes] == fact["working_dtypes"]
    raw = torch.tensor([-2, 0, 0.5, 2])
    assert spec.process_output(raw).tolist() == fact["process_output_of_-2_0_.5_2"]
    if fact["process_input_of_0_.25_1"] == "NotImplementedError":
        with pytest.raises(NotImplementedError, match=f"{RECORDED[recorded_as]} was trained to"):
            spec.process_input(torch.zeros(1))
    else:
        made = spec.process_input(torch.tensor([0, 0.25, 1])).tolist()
        assert made == fact["process_input_of_0_.25_1"]


# A pixel over time and a channel of the latent, by the network's author's own code (TAEHV of
# fastvideo 0.2.1, MIT) with the same weights.
DECODED = [0.43933, 0.52925, 0.54537, 0.17244, 0.48446, 0.50081, 0.59005, 0.16376, 0.48106]
ENCODED = [-0.1626, 0.12339, 0.16695, 0.21538, -0.24899, 0.17556, 0.23132, 0.154]


def test_another_implementation_gives_the_same() -> None:
    network = TAEHV(48)
    fill_by_formula(network.state_dict())
    latent = torch.linspace(-2, 2, 48 * 12).sin().mul(2).reshape(1, 48, 3, 2, 2)
    pixels = torch.linspace(0, 40, 18 * 32**2).sin().mul(0.5).add(0.5)
    decoded = network.decode(latent)[0, 1, :, 5, 7]
    encoded = network.encode(pixels.reshape(1, 3, 6, 32, 32))[0, 3].flatten()
    torch.testing.assert_close(decoded, torch.tensor(DECODED), atol=1e-4, rtol=0)
    torch.testing.assert_close(encoded, torch.tensor(ENCODED), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("channels", "patch"), [(16, 1), (48, 2)])
def test_pieces_make_the_whole(channels: int, patch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network = narrow(channels, patch)
    latent, pixels = normal(2, channels, 5, 2, 3), normal(2, 3, 14, 16 * patch, 24 * patch)
    whole = network.decode(latent), network.encode(pixels)
    assert whole[0].shape == (2, 3, 17, 16 * patch, 24 * patch)
    assert whole[1].shape == (2, channels, 4, 2, 3)
    for frames in (1, 2, 3):
        monkeypatch.setattr(video, "PIECE_PIXELS", frames * 4 * 2 * whole[0][0, 0, 0].numel())
        torch.testing.assert_close(network.decode(latent), whole[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(network.encode(pixels), whole[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("changed", [1, 2, 3])
def test_later_frames_never_change_earlier_ones_and_earlier_ones_do(changed: int) -> None:
    network = narrow()
    latent, pixels = normal(1, 16, 4, 2, 2), normal(1, 3, 13, 16, 16)
    other, repainted = latent.clone(), pixels.clone()
    other[:, :, changed] += 1
    repainted[:, :, 4 * changed] += 1
    difference = (network.decode(latent) - network.decode(other)).abs().amax((0, 1, 3, 4))
    assert difference[: 4 * changed - 3].max() == 0
    assert difference[4 * changed - 3 :].min() > 1e-4
    difference = (network.encode(pixels) - network.encode(repainted)).abs().amax((0, 1, 3, 4))
    assert difference[:changed].max() == 0
    assert difference[changed:].min() > 1e-4


def test_pixels_stay_in_their_range() -> None:
    network = narrow()
    network.decoder[-1].weight *= 100
    pixels = network.decode(normal(1, 16, 2, 2, 2))
    assert (pixels.min(), pixels.max()) == (0, 1)


def test_the_estimate_of_memory_knows_that_a_long_video_goes_in_pieces() -> None:
    def estimate(frames: int) -> float:
        return taehv_memory((1, 16, frames, 60, 104), torch.bfloat16, width=64, cell=8, time=4)

    pixels = 480 * 832
    assert estimate(21) - estimate(11) == pytest.approx(10 * 4 * pixels * 3 * 2 * 2)
    assert estimate(1) > 4 * pixels * 64 * 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """models/vae_approx; models/vae lies beside it."""
    for name in ("vae", "vae_approx"):
        (tmp_path / name).mkdir()
        entry = ([str(tmp_path / name)], folder_paths.supported_pt_extensions)
        monkeypatch.setitem(folder_paths.folder_names_and_paths, name, entry)
    return tmp_path / "vae_approx"


def put(
    path: Path, channels: int = 16, patch: int = 1, dtype: torch.dtype = torch.float32
) -> TAEHV:
    network = narrow(channels, patch).to(dtype)
    save_file(network.state_dict(), path)
    return network


def load(name: str) -> VAE:
    return nodes.VAELoader().load_vae(name)[0]


@pytest.mark.parametrize("name", TRAINED)
def test_a_video_goes_through_the_nodes_whole_and_in_tiles(name: str, folder: Path) -> None:
    space = TRAINED[name].latent_format()
    patch = space.spacial_downscale_ratio // 8
    put(folder / f"{name}.safetensors", space.latent_channels, patch)
    assert f"{name}.safetensors" in nodes.VAELoader.vae_list()
    vae = load(f"{name}.safetensors")
    latent = {"samples": normal(1, space.latent_channels, 3, 6, 8)}
    pixels = nodes.VAEDecode().decode(vae, latent)[0]
    assert pixels.shape == (9, 48 * patch, 64 * patch, 3)
    assert pixels.std() > 0.01
    tiles = nodes.VAEDecodeTiled().decode(vae, latent, 64 * patch, 0, 8, 4)[0]
    assert tiles.shape == pixels.shape
    one = nodes.VAEDecodeTiled().decode(vae, latent, 64 * patch, 0, 64, 8)[0]
    torch.testing.assert_close(one, pixels, atol=0.02, rtol=0)
    if TRAINED[name].decodes_only:
        with pytest.raises(
            NotImplementedError, match=f"{name} was trained to decode only.*own autoencoder"
        ):
            nodes.VAEEncode().encode(vae, pixels)
        return
    encoded = nodes.VAEEncode().encode(vae, pixels)[0]["samples"]
    assert encoded.shape == latent["samples"].shape
    in_tiles = nodes.VAEEncodeTiled().encode(vae, pixels, 64 * patch, 0, 64, 8)[0]["samples"]
    torch.testing.assert_close(in_tiles, encoded, atol=0.05, rtol=0.02)
    alone = nodes.VAEEncode().encode(vae, pixels[:1])[0]["samples"]
    assert alone.shape == (1, space.latent_channels, 1, 6, 8)


@pytest.mark.parametrize(
    ("file", "dtype", "space"),
    [
        ("taew2_1.safetensors", torch.float16, latent_formats.Wan21),
        ("taehv.safetensors", torch.float32, latent_formats.HunyuanVideo),
        ("unnamed.safetensors", torch.float16, latent_formats.HunyuanVideo),
        ("unnamed.safetensors", torch.bfloat16, latent_formats.Wan21),
    ],
)
@pytest.mark.parametrize("kind", ["vae", "vae_approx"])
def test_the_name_and_else_the_precision_of_a_file_tells_its_latent_space(
    file: str, dtype: torch.dtype, space: Any, kind: str, folder: Path
) -> None:
    if file.startswith("unnamed") and kind == "vae_approx":
        assert file not in nodes.VAELoader.vae_list()
        return
    network = put(folder.parent / kind / file, dtype=dtype).float()
    vae = load(file)
    vae.first_stage_model.float()
    vae.vae_dtype = torch.float32
    latent = normal(1, 16, 2, 4, 4)
    expected = network.decode(space().process_in(latent))[0].movedim(0, -1)
    torch.testing.assert_close(vae.decode(latent)[0], expected, atol=2e-3, rtol=0)
    pixels = expected[None]
    encoded = space().process_out(network.encode(pixels.movedim(-1, 1)))
    torch.testing.assert_close(vae.encode(pixels), encoded, atol=2e-2, rtol=1e-2)


def test_the_light_ones_take_latents_and_give_pixels_as_they_were_trained() -> None:
    """That of Wan 2.2 takes them as the autoencoder makes them; that of HunyuanVideo 1.5 gives -1
    to 1 and lets a fifth of negative values through.
    """
    for name, channels in (("lighttaew2_2", 48), ("lighttaehy1_5", 32)):
        weights = narrow(channels, 2).state_dict()
        vae = VAE(sd=weights, dtype=torch.float32)
        assert vae.spec.name == f"TAEHV ({name})"
        latent = normal(1, channels, 2, 2, 2)
        sizes: dict[str, Any] = {"patch_size": 2, "widths": (16, 8, 8, 8), "encoder_width": 8}
        if channels == 48:
            network = TAEHV(channels, **sizes)
            network.load_state_dict(weights)
            expected = network.decode(latent)
        else:
            network = TAEHV(channels, leak=0.2, is_signed=True, **sizes)
            network.load_state_dict(weights)
            signed = network.decode(latent_formats.HunyuanVideo15().process_in(latent))
            assert signed.min() < 0
            expected = (signed / 2 + 0.5).clamp(0, 1)
        torch.testing.assert_close(vae.decode(latent), expected.movedim(1, -1))


def test_a_saved_file_still_knows_its_latent_space(folder: Path) -> None:
    put(folder / "taehv.safetensors")
    vae = load("taehv.safetensors")
    path = folder.parent / "vae" / "copy.safetensors"
    weights = {key: value.float().contiguous() for key, value in vae.get_sd().items()}
    save_file(weights, path, metadata=autoencoder_hints(vae))
    assert load("copy.safetensors").spec.name == vae.spec.name == "TAEHV (taehv)"


def test_sizes_that_no_named_file_has_come_from_shapes() -> None:
    """Those of LTX video: patches of 4 x 4 pixels, eight frames to a latent frame."""
    thrice = (True, True, True)
    network = TAEHV(128, False, thrice, thrice, widths=(16, 8, 8, 8), encoder_width=8)
    fill_by_formula(network.state_dict())
    vae = VAE(sd=network.state_dict(), dtype=torch.float32)
    latent = normal(1, 128, 3, 2, 2)
    pixels = vae.decode(latent)
    assert pixels.shape == (1, 17, 64, 64, 3)
    torch.testing.assert_close(pixels, network.decode(latent).movedim(1, -1))
    assert vae.encode(pixels[0]).shape == latent.shape
    assert (vae.spec.name, vae.spec.header) == ("TAEHV", {})


def test_a_name_that_does_not_fit_the_channels_is_not_believed(folder: Path) -> None:
    put(folder / "taehv.safetensors", channels=48, patch=2)
    assert load("taehv.safetensors").spec.name == "TAEHV (lighttaew2_2)"


def test_a_cut_off_file_is_told_with_its_name(folder: Path) -> None:
    path = folder / "taew2_1.safetensors"
    put(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(WeightFileError, match=r"taew2_1\.safetensors"):
        load(path.name)


@pytest.mark.parametrize(
    "key", ["encoder.0.weight", "decoder.7.conv.weight", "decoder.4.conv.0.bias"]
)
def test_a_file_with_a_hole_is_told_with_its_name_and_what_it_lacks(key: str, folder: Path) -> None:
    weights = narrow().state_dict()
    del weights[key]
    save_file(weights, folder / "taew2_1.safetensors")
    with pytest.raises(Exception, match=rf"taew2_1\.safetensors.*{key}") as caught:
        load("taew2_1.safetensors")
    assert isinstance(caught.value, (IncompleteWeightsError, WeightFileError))


def test_packages_find_the_names_they_use() -> None:
    from comfy.taesd.taehv import TAEHV as public
    from comfy.taesd.taehv import apply_model_with_memblocks

    network = public(latent_channels=16, decoder_time_upscale=(True, True), parallel=True)
    fill_by_formula(network.state_dict())
    latent = normal(1, 16, 2, 2, 2)
    frames = apply_model_with_memblocks(network.decoder, latent.movedim(2, 1), True, False)
    torch.testing.assert_close(frames[:, 3:].clamp(0, 1).movedim(1, 2), network.decode(latent))
