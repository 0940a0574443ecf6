"""Files become models; whatever is wrong with a file, the error names it, the cause and a mend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from comfy import loading
from comfy.weights import errors
from comfy.weights.mapped_file import is_file_backed
from tests.support import tiny_checkpoint

UNET = "model.diffusion_model."


@pytest.fixture(scope="module")
def checkpoint_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("models") / "tiny.safetensors")


def test_a_checkpoint_gives_model_text_encoder_and_autoencoder(checkpoint_file: Path) -> None:
    model, clip, vae, clip_vision = loading.load_checkpoint_guess_config(str(checkpoint_file))
    assert clip_vision is None
    config = model.model.model_config.unet_config
    assert (config["context_dim"], config["num_heads"], config["norm_num_groups"]) == (32, 2, 4)
    text = clip.encode_from_tokens(clip.tokenize("a red circle"), return_pooled=True)
    assert [tuple(part.shape) for part in text] == [(1, 77, 32), (1, 32)]
    assert vae.decode(torch.zeros(1, 4, 4, 4)).shape == (1, 32, 32, 3)


def test_parts_that_are_not_wanted_are_not_made(checkpoint_file: Path) -> None:
    parts = loading.load_checkpoint_guess_config(
        str(checkpoint_file), output_vae=False, output_clip=False
    )
    assert parts.model is not None
    assert parts[1:] == (None, None, None)


def test_weights_of_the_right_type_stay_in_the_file(checkpoint_file: Path) -> None:
    model = loading.load_checkpoint_guess_config(str(checkpoint_file)).model
    parameters = list(model.model.diffusion_model.parameters())
    # A CPU reads the kernels of convolutions faster in another order; those are copied.
    plain = [p for p in parameters if p.ndim != 4 or p.shape[2:].numel() == 1]
    assert len(plain) > len(parameters) / 2
    assert all(is_file_backed(parameter) for parameter in plain)


def test_half_precision_weights_are_converted_once(tmp_path: Path) -> None:
    tensors = tiny_checkpoint.weights(torch.float16)
    path = tiny_checkpoint.write(tmp_path / "half.safetensors", tensors)
    model = loading.load_checkpoint_guess_config(str(path)).model
    parameters = list(model.model.diffusion_model.parameters())
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    assert not any(is_file_backed(parameter) for parameter in parameters)


def test_a_dtype_can_be_asked_for(checkpoint_file: Path) -> None:
    options = {"dtype": torch.bfloat16}
    model = loading.load_checkpoint_guess_config(str(checkpoint_file), model_options=options).model
    assert model.model_dtype() == torch.bfloat16
    assert model.model.manual_cast_dtype == torch.float32  # what the CPU computes in


def test_a_network_alone_is_a_diffusion_model_with_or_without_prefix(tmp_path: Path) -> None:
    tensors = tiny_checkpoint.weights()
    network = {key: value for key, value in tensors.items() if key.startswith(UNET)}
    bare = {key[len(UNET) :]: value for key, value in network.items()}
    for name, content in (("with", network), ("without", bare)):
        path = tiny_checkpoint.write(tmp_path / f"{name}.safetensors", content)
        model = loading.load_diffusion_model(str(path))
        assert model.model.model_config.unet_config["context_dim"] == 32


def test_missing_parts_of_a_checkpoint_are_none_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = tiny_checkpoint.weights()
    network = {key: value for key, value in tensors.items() if key.startswith(UNET)}
    path = tiny_checkpoint.write(tmp_path / "network.safetensors", network)
    parts = loading.load_checkpoint_guess_config(str(path))
    assert parts.model is not None
    assert parts.clip is None
    assert parts.vae is None
    assert "no text encoder" in caplog.text
    assert "no autoencoder" in caplog.text


# -- bad files -----------------------------------------------------------------------------------

BAD_FILES = {
    "empty": (b"", errors.EmptyWeightFileError, "empty"),
    "html": (b"<!DOCTYPE html><html><body>404</body></html>", errors.HtmlPageError, "web page"),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        errors.LfsPointerError,
        "git lfs pull",
    ),
    "text": (b"not a model at all, just words", errors.NotSafetensorsError, "safetensors"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_is_no_model_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    content, error, words = BAD_FILES[kind]
    path = tmp_path / f"{kind}.safetensors"
    path.write_bytes(content)
    with pytest.raises(error) as caught:
        loading.load_checkpoint_guess_config(str(path))
    assert path.name in str(caught.value)
    assert words in str(caught.value)
    assert "To mend it" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.MissingWeightFileError, match=r"absent\.safetensors"):
        loading.load_checkpoint_guess_config(str(tmp_path / "absent.safetensors"))


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_named(checkpoint_file: Path, tmp_path: Path, share: float) -> None:
    whole = checkpoint_file.read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(whole[: max(4, int(len(whole) * share))])
    with pytest.raises(errors.TruncatedWeightFileError, match=r"cut\.safetensors"):
        loading.load_checkpoint_guess_config(str(path))


@pytest.mark.parametrize(
    "load", [loading.load_checkpoint_guess_config, loading.load_diffusion_model]
)
def test_an_unknown_architecture_is_described_with_what_is_supported(
    tmp_path: Path, load: object
) -> None:
    path = tmp_path / "strange.safetensors"
    save_file({f"layers.{n}.mystery.weight": torch.zeros(2) for n in range(9)}, path)
    with pytest.raises(loading.UnknownArchitectureError) as caught:
        load(str(path))  # type: ignore[operator]
    message = str(caught.value)
    assert "strange.safetensors" in message
    assert "9 keys (layers.0.mystery.weight, " in message
    assert "Stable Diffusion 1.x" in message
    assert "SDXL" in message


def test_a_checkpoint_with_weights_missing_is_named_with_the_weights(tmp_path: Path) -> None:
    tensors = tiny_checkpoint.weights()
    del tensors[f"{UNET}out.2.bias"]
    path = tiny_checkpoint.write(tmp_path / "hole.safetensors", tensors)
    with pytest.raises(loading.BrokenCheckpointError, match=r"hole\.safetensors.*1 key \(out\.2"):
        loading.load_checkpoint_guess_config(str(path))


def test_contradictory_shapes_are_named(tmp_path: Path) -> None:
    tensors = tiny_checkpoint.weights()
    tensors[f"{UNET}out.2.weight"] = torch.zeros(4, 17, 3, 3)
    path = tiny_checkpoint.write(tmp_path / "odd.safetensors", tensors)
    with pytest.raises(loading.BrokenCheckpointError, match=r"odd\.safetensors.*out\.2\.weight"):
        loading.load_checkpoint_guess_config(str(path))


@pytest.mark.parametrize(
    ("section", "counts"),
    [
        ("unet_config", '{"num_heads": 3, "norm_num_groups": 4}'),
        ("unet_config", '{"num_heads": 2}'),  # the usual 32 groups do not divide 16 channels
        ("text_config", '{"num_attention_heads": 3}'),
        ("vae_config", '{"norm_num_groups": 3}'),
    ],
)
def test_counts_in_the_header_that_cannot_be_are_an_error_that_names_the_file(
    tmp_path: Path, section: str, counts: str
) -> None:
    header = {**tiny_checkpoint.HEADER, section: counts}
    path = tiny_checkpoint.write(tmp_path / "counts.safetensors", metadata=header)
    with pytest.raises(loading.BrokenCheckpointError, match=r"counts\.safetensors.*header"):
        loading.load_checkpoint_guess_config(str(path))


def test_a_checkpoint_is_not_changed_by_loading_and_the_next_load_works(
    checkpoint_file: Path,
) -> None:
    before = checkpoint_file.read_bytes()
    for _ in range(2):
        assert loading.load_checkpoint_guess_config(str(checkpoint_file)).model is not None
    assert checkpoint_file.read_bytes() == before


# -- LoRA ----------------------------------------------------------------------------------------

TARGET = "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.weight"


def lora(name: str = "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q") -> dict:
    return {
        f"{name}.lora_down.weight": torch.ones(2, 32),
        f"{name}.lora_up.weight": torch.ones(32, 2),
        f"{name}.alpha": torch.tensor(2.0),
    }


def test_a_lora_makes_views_and_leaves_the_originals_alone(checkpoint_file: Path) -> None:
    model, clip, *_ = loading.load_checkpoint_guess_config(str(checkpoint_file))
    new_model, new_clip = loading.load_lora_for_models(model, clip, lora(), 0.5, 0.5)
    assert list(new_model.patches) == [TARGET]
    assert model.patches == {}
    assert new_model.model is model.model
    assert new_clip.cond_stage_model is clip.cond_stage_model


def test_a_lora_for_the_model_only_needs_no_text_encoder(checkpoint_file: Path) -> None:
    model = loading.load_checkpoint_guess_config(str(checkpoint_file)).model
    new_model, new_clip = loading.load_lora_for_models(model, None, lora(), 1.0, 0.0)
    assert list(new_model.patches) == [TARGET]
    assert new_clip is None


def test_a_lora_that_fits_no_key_is_an_error_that_names_it(checkpoint_file: Path) -> None:
    model, clip, *_ = loading.load_checkpoint_guess_config(str(checkpoint_file))
    foreign = lora("lora_unet_double_blocks_0_img_attn_qkv")
    with pytest.raises(errors.NoMatchingWeightsError) as caught:
        loading.load_lora_for_models(model, clip, foreign, 1.0, 1.0, path="flux_lora.safetensors")
    assert "flux_lora.safetensors" in str(caught.value)
    assert "double_blocks" in str(caught.value)
    assert model.patches == {}


CLIP_LAYER = "lora_te_text_model_encoder_layers_0_mlp_fc1"


def test_what_of_a_lora_fits_no_weight_is_said_beside_the_node(
    checkpoint_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr("comfy.progress.NOTE_HOOK", notes.append)
    model, clip, *_ = loading.load_checkpoint_guess_config(str(checkpoint_file))
    mixed = lora() | lora("lora_unet_nowhere") | lora(f"{CLIP_LAYER}_x")
    loading.load_lora_for_models(
        model, clip, mixed, 1.0, 1.0, path="/models/loras/mixed.safetensors"
    )
    assert len(notes) == 1
    assert "mixed.safetensors: 6 of 9 LoRA tensors fit no weight of this model" in notes[0]
    assert "Stable Diffusion 1" in notes[0]
    notes.clear()  # without a text encoder nobody asks for its changes
    loading.load_lora_for_models(model, None, mixed, 1.0, 1.0, path="mixed.safetensors")
    assert "3 of 9" in notes[0]
    notes.clear()
    loading.load_lora_for_models(model, None, lora() | lora(CLIP_LAYER), 1.0, 1.0)
    assert notes == []


def test_factors_of_a_layer_without_a_bias_are_not_missed_there(
    checkpoint_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loading.load_checkpoint_guess_config(str(checkpoint_file)).model
    layer = "diffusion_model.middle_block.1.transformer_blocks.0.attn2."
    rows = model.model.state_dict()[f"{layer}to_out.0.weight"].shape[0]
    file = {f"{layer}{n}.ia3_l": torch.full((rows, 1), 2.0) for n in ("to_q", "to_out.0")}
    view, _ = loading.load_lora_for_models(model, None, file, 1.0, 0.0)
    assert sorted(view.patches) == [
        f"{layer}{n}" for n in ("to_out.0.bias", "to_out.0.weight", "to_q.weight")
    ]
    assert caplog.text == ""


def test_changes_of_another_size_are_left_out_and_said_once(
    checkpoint_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loading.load_checkpoint_guess_config(str(checkpoint_file)).model
    other = lora("lora_unet_middle_block_1_transformer_blocks_0_attn2_to_k")
    wide = {k: torch.ones(2, 2048) if "down" in k else v for k, v in other.items()}
    view, _ = loading.load_lora_for_models(
        model, None, lora() | wide, 1.0, 0.0, path="x.safetensors"
    )
    assert list(view.patches) == [TARGET]
    assert "x.safetensors: 1 of 2 changes have other sizes" in caplog.text
    assert "made for SDXL" in caplog.text


def test_a_lora_of_another_size_throughout_is_an_error(checkpoint_file: Path) -> None:
    model = loading.load_checkpoint_guess_config(str(checkpoint_file)).model
    other = lora("lora_unet_middle_block_1_transformer_blocks_0_attn2_to_k")
    wide = {k: torch.ones(2, 2048) if "down" in k else v for k, v in other.items()}
    with pytest.raises(errors.NoMatchingWeightsError) as caught:
        loading.load_lora_for_models(model, None, wide, 1.0, 0.0, path="xl.safetensors")
    for part in ("xl.safetensors", "all 1 changes have other sizes", "made for SDXL",
                 "Stable Diffusion 1"):  # fmt: skip
        assert part in str(caught.value)
    assert model.patches == {}
