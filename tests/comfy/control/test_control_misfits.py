"""Control networks on models of another kind: refused with both shapes, or said to do nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from comfy import loading
from comfy.control.loading import load_controlnet
from comfy.sampling import noise, run, samplers
from comfy_nodes.control import ControlNetApplyAdvanced
from tests.comfy.control.test_transformer_control import HintVAE, flux_file, golden

MODELS = ("unet_sd1", "flux", "sd3_mmdit", "qwen_image", "lumina2", "auraflow")
ADAPTERS = ("t2i_adapter_full", "t2i_adapter_light", "t2i_adapter_xl")
CONTROLS = ("controlnet_sd1", "controlnet_sd3", "flux union", *ADAPTERS)
# What becomes of a control network: it works, does nothing and is said to, or is refused.
WORKS = {("unet_sd1", "controlnet_sd1"), ("flux", "flux union"), ("sd3_mmdit", "controlnet_sd3")}
IDLE = {
    *((model, adapter) for model in ("sd3_mmdit", "lumina2", "auraflow") for adapter in ADAPTERS),
    ("lumina2", "flux union"), ("auraflow", "flux union"),
}  # fmt: skip
# These small networks have one width of text, or no block where the other has a residual.
BY_CHANCE = {("unet_sd1", "controlnet_sd3"), ("flux", "t2i_adapter_xl")}


def written(folder: Path, name: str, golden_folder: Path) -> str:
    path = folder / f"{name}.safetensors"
    weights = golden(golden_folder, name).weights
    save_file({key: value.contiguous() for key, value in weights.items()}, path)
    return str(path)


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory, golden_folder: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("controls")
    paths = {name: written(folder, name, golden_folder) for name in CONTROLS if " " not in name}
    paths["flux union"] = flux_file(folder, golden_folder)[0]
    return {name: load_controlnet(path) for name, path in paths.items()}


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_control_network_of_another_model_is_refused_or_said_to_do_nothing(
    name: str, controls: dict[str, Any], golden_folder: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    model = loading.load_diffusion_model(written(tmp_path, name, golden_folder))
    inputs = {key.split("/")[-1]: v for key, v in golden(golden_folder, name).inputs.items()}
    latent = torch.zeros(1, *inputs["x"].shape[1:])
    model.model.latent_format.latent_channels = latent.shape[1]  # as the recorded network has them
    cond = [[inputs["context"][:1], {"pooled_output": inputs.get("y", latent)[:1]}]]
    for kind, control in controls.items():
        caplog.clear()
        hint = torch.rand(1, latent.shape[-2] * 8, latent.shape[-1] * 8, 3)
        vae = HintVAE(latent.shape[1])
        both = ControlNetApplyAdvanced().apply_controlnet(
            cond, cond, control, hint, 1.0, 0.0, 1.0, vae=vae
        )
        arguments = (model, noise.prepare_noise(latent, 1), 2.0, samplers.ksampler("euler"))
        refusal = ""
        try:
            run.sample_custom(*arguments, torch.tensor([0.9, 0.0]), *both, latent)
        except ValueError as error:
            refusal = str(error)
        is_said = "has no effect on this kind of model" in caplog.text
        case = (name, kind)
        assert ("made for another model" in refusal) == (case not in WORKS | IDLE | BY_CHANCE), case
        assert not (is_said and case in WORKS), case
        assert is_said or case not in IDLE, case
