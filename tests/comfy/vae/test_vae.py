"""The VAE class against recorded results: cropping, tiles, NaN, memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy.devices import residency
from comfy.ldm.taesd.model import TAESD
from comfy.vae.finite import NotFiniteError
from comfy.vae.kinds import detect_autoencoder
from comfy.vae.vae import VAE
from comfy.weights.fill import IncompleteWeightsError
from comfy_nodes.vae import VAEEncodeTiled
from tests.support.golden_nets import GoldenNet, assert_close_to_golden, read_golden_net


@pytest.fixture(scope="module")
def weights(golden_folder: Path) -> dict[str, torch.Tensor]:
    return read_golden_net(golden_folder / "nets/vae_kl.safetensors").weights


@pytest.fixture
def vae(weights) -> VAE:
    return VAE(sd=weights, dtype=torch.float32)


@pytest.fixture(scope="module")
def recorded(golden_folder: Path) -> GoldenNet:
    return read_golden_net(golden_folder / "nets/vae_wrapper.safetensors")


@torch.inference_mode()
def test_encode_and_decode_agree_with_the_reference(vae: VAE, recorded: GoldenNet) -> None:
    assert vae.downscale_ratio == vae.upscale_ratio == 2
    assert_close_to_golden(vae.decode(recorded.inputs["z"]), recorded.outputs["decode"])
    latent = vae.encode(recorded.inputs["pixels_0_1_nhwc"])
    assert_close_to_golden(latent, recorded.outputs["encode_seed99"])


@torch.inference_mode()
def test_tiles_agree_with_the_reference(vae: VAE, recorded: GoldenNet) -> None:
    decoded = vae.decode_tiled(recorded.inputs["z"], tile_x=8, tile_y=8, overlap=2)
    assert_close_to_golden(decoded, recorded.outputs["decode_tiled_tile8_overlap2"])
    encoded = vae.encode_tiled(recorded.inputs["pixels_0_1_nhwc"], tile_x=16, tile_y=16, overlap=4)
    assert_close_to_golden(encoded, recorded.outputs["encode_tiled_tile16_overlap4_seed99"])


@torch.inference_mode()
def test_a_batch_decodes_like_its_pictures_one_by_one(vae: VAE, recorded: GoldenNet) -> None:
    z = torch.cat([recorded.inputs["z"]] * 3)
    vae.memory_used_decode = lambda shape, dtype: 1e15  # only one at a time fits
    decoded = vae.decode(z)
    assert decoded.shape == (3, 48, 40, 3)
    assert_close_to_golden(decoded[2:], recorded.outputs["decode"])


@torch.inference_mode()
def test_running_out_of_memory_leads_to_tiles(vae: VAE, recorded: GoldenNet, monkeypatch) -> None:
    network_decode, sizes = vae.first_stage_model.decode, []

    def small_memory(z, **options):
        sizes.append(z.shape[-2:].numel())
        if z.shape[-2:].numel() > 300:
            raise torch.OutOfMemoryError("full")
        return network_decode(z, **options)

    monkeypatch.setattr(vae.first_stage_model, "decode", small_memory)
    monkeypatch.setattr(vae.decode_tiled_.__func__, "__defaults__", (16, 16, 4))
    decoded = vae.decode(recorded.inputs["z"])
    assert sizes[0] == 480
    assert decoded.shape == recorded.outputs["decode"].shape
    assert len(sizes) > 3


@torch.inference_mode()
def test_nan_in_the_latent_is_named_as_the_cause(vae: VAE, recorded: GoldenNet) -> None:
    z = recorded.inputs["z"].clone()
    z[0, 0, 0, 0] = float("nan")
    with pytest.raises(NotFiniteError, match="latent"):
        vae.decode(z)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "cause"), [(1e30, r"reach 1e\+30, .* below 100"), (0, "zeros too")]
)
def test_what_gave_nan_is_found_out(weights, recorded: GoldenNet, size, cause, dtype) -> None:
    broken = {k: v * (float("nan") if size == 0 else 1.0) for k, v in weights.items()}
    vae = VAE(sd=broken, dtype=dtype)
    with pytest.raises(NotFiniteError, match=cause):
        vae.decode(recorded.inputs["z"].sign() * (size or 1.0))


@torch.inference_mode()
def test_a_file_damaged_in_part_is_told_from_a_large_latent(weights, recorded: GoldenNet) -> None:
    vae = VAE(sd=weights, dtype=torch.float32)
    first = vae.first_stage_model.decoder.conv_in
    first.weight.data *= 1e38
    first.bias.data.zero_()
    vae.first_stage_model.post_quant_conv.bias.data.zero_()
    with pytest.raises(NotFiniteError, match=r"usual size.*damaged in part"):
        vae.decode(recorded.inputs["z"])


@torch.inference_mode()
def test_nan_from_low_precision_is_mended_in_float32(weights, recorded: GoldenNet) -> None:
    vae = VAE(sd=weights, dtype=torch.bfloat16)
    network_decode = vae.first_stage_model.decode

    def overflows(z, **options):
        out = network_decode(z, **options)
        return out * float("nan") if z.dtype == torch.bfloat16 else out

    vae.first_stage_model.decode = overflows
    assert vae.decode(recorded.inputs["z"]).isfinite().all()
    assert vae.vae_dtype == torch.float32


def test_a_vae_widened_after_nan_stays_so_when_it_is_loaded_again(
    accelerator: Any, weights, recorded: GoldenNet
) -> None:
    vae = VAE(sd=weights, dtype=torch.bfloat16)
    network_decode = vae.first_stage_model.decode

    def overflows(z, **options):
        out = network_decode(z, **options)
        return out * float("nan") if z.dtype == torch.bfloat16 else out

    vae.first_stage_model.decode = overflows
    first = vae.decode(recorded.inputs["z"])
    assert torch.accelerator.memory_allocated(0) == vae.patcher.loaded_size() > 0
    residency.unload_all_models()
    assert torch.equal(vae.decode(recorded.inputs["z"]), first)
    assert {p.dtype for p in vae.first_stage_model.parameters()} == {torch.float32}


def test_a_latent_of_another_model_is_refused_with_both_numbers(vae: VAE) -> None:
    with pytest.raises(ValueError, match=r"16 channels.*4"):
        vae.decode(torch.zeros(1, 16, 8, 8))


@pytest.mark.parametrize("shape", [(), (64,), (8, 8)])
def test_what_is_no_latent_is_refused_with_its_shape(vae: VAE, shape: tuple[int, ...]) -> None:
    for decode in (vae.decode, vae.decode_tiled):
        with pytest.raises(ValueError, match=rf"shape {re.escape(str(shape))}: it is no latent"):
            decode(torch.zeros(shape))


@torch.inference_mode()
def test_alpha_is_left_out(vae: VAE) -> None:
    picture = torch.rand(1, 16, 16, 3)
    with_alpha = torch.cat([picture, torch.zeros(1, 16, 16, 1)], dim=-1)
    torch.manual_seed(0)
    expected = vae.encode(picture)
    torch.manual_seed(0)
    assert torch.equal(vae.encode(with_alpha), expected)


@torch.inference_mode()
@pytest.mark.parametrize(("tile", "overlap"), [(64, 1), (64, 64), (65, 33)])
def test_every_tile_of_the_node_is_whole(vae: VAE, tile: int, overlap: int) -> None:
    latent = VAEEncodeTiled().encode(vae, torch.rand(1, 64, 130, 3), tile, overlap)[0]["samples"]
    assert latent.shape[-2:] == (32, 65)


def test_a_picture_smaller_than_a_cell_is_refused(vae: VAE) -> None:
    with pytest.raises(ValueError, match="too small to encode: each side needs at least 2 pixels"):
        vae.encode(torch.zeros(1, 1, 16, 3))


def test_weights_of_no_known_kind_are_refused() -> None:
    with pytest.raises(IncompleteWeightsError, match=r"weight\.of\.something"):
        VAE(sd={"weight.of.something": torch.zeros(1)})


def test_a_missing_weight_is_named(weights) -> None:
    cut = {key: value for key, value in weights.items() if key != "decoder.conv_out.bias"}
    with pytest.raises(IncompleteWeightsError, match=r"decoder\.conv_out\.bias"):
        VAE(sd=cut)


def test_weights_come_back_as_they_went_in(vae: VAE, weights) -> None:
    saved = vae.get_sd()
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[key], weights[key]) for key in weights)


def test_a_loaded_vae_is_in_the_residents_list(vae: VAE) -> None:
    vae.decode(torch.zeros(1, 4, 4, 4))
    assert vae.patcher in residency.loaded_models()


@pytest.mark.parametrize(("name", "channels"), [("taesd_4ch", 4), ("taesd_16ch", 16)])
@torch.inference_mode()
def test_taesd_agrees_with_the_reference(name: str, channels: int, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"nets/{name}.safetensors")
    model = TAESD(latent_channels=channels)
    model.load_state_dict(net.weights)
    assert_close_to_golden(model.decode(net.inputs["z"]), net.outputs["decode"])
    assert_close_to_golden(model.encode(net.inputs["image_-1_1"]), net.outputs["encode"])
    spec = detect_autoencoder(net.weights)
    assert (spec.name, spec.latent_channels) == ("TAESD", channels)


@torch.inference_mode()
def test_norm_groups_come_from_the_header(weights) -> None:
    one = VAE(sd=weights, metadata={"vae_config": '{"norm_num_groups": 2}'})
    assert one.first_stage_model.decoder.norm_out.num_groups == 2


@torch.inference_mode()
def test_a_picture_that_the_machine_could_never_hold_whole_goes_in_tiles(
    vae: VAE, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    latent = torch.rand(1, 4, 8, 8)
    whole = vae.decode(latent)
    monkeypatch.setattr(vae, "memory_used_decode", lambda shape, dtype: 1e18)
    monkeypatch.setattr(vae, "memory_used_encode", lambda shape, dtype: 1e18)
    in_tiles = vae.decode(latent)
    assert "in smaller parts" in caplog.text
    assert in_tiles.shape == whole.shape
    assert vae.encode(whole).shape == latent.shape
