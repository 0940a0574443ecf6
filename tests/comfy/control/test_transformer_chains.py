"""Chains of a FLUX union network, of other kinds for each text, against residuals by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy import loading
from comfy.control.base import Control, ControlBase
from comfy.control.loading import load_controlnet
from comfy.sampling import noise, run, samplers
from comfy_extras.nodes_controlnet import SetUnionControlNetType
from comfy_nodes.control import ControlNetApplyAdvanced
from tests.comfy.control.test_transformer_control import HintVAE, flux_file, golden

SIGMAS = torch.tensor([1.0, 0.7, 0.35, 0.0])
KINDS = {"openpose": 0, "depth": 1, "hed/pidi/scribble/ted": 2}  # as many as the network tells
SIZE = (4, 8, 6)
Link = tuple[str, float, float, float, Tensor]  # kind, strength, start, end, hint [B, H, W, C]


class ByHand(ControlBase):
    """Residuals of several links, each from one call of the network for each picture."""

    def __init__(self, network: Any, links: list[Link], shared: Any) -> None:
        super().__init__()
        self.network, self.links, self.shared = network, links, shared

    def pre_run(self, model: Any, percent_to_timestep_function: Any) -> None:
        self.sampling = model.model_sampling

    def get_control(self, x: Tensor, t: Tensor, cond: Any, batched: int, options: Any) -> Control:
        per_text = len(x) // batched
        rows: list[Control] = []
        for item in range(len(x)):
            total: Control = {"input": [], "middle": [], "output": []}
            for kind, strength, start, end, hint in self.links:
                to_sigma = self.sampling.percent_to_sigma
                if not to_sigma(end) <= float(t[item]) <= to_sigma(start):
                    continue
                own = item % per_text % len(hint)
                seen = self.shared["vae"].encode(hint[own : own + 1])
                made = self.network(
                    x=x[item : item + 1], hint=self.shared["format"].process_in(seen),
                    timesteps=t[item : item + 1], context=cond["c_crossattn"][item : item + 1],
                    y=cond["y"][item : item + 1], guidance=cond["guidance"][item : item + 1],
                    control_type=[KINDS[kind]],
                )  # fmt: skip
                for part, residuals in made.items():
                    scaled = [residual * strength for residual in residuals]
                    known = total[part]
                    total[part] = [a + b for a, b in zip(known, scaled)] if known else scaled
            rows.append(total)
        return {
            part: [torch.cat(parts) for parts in zip(*(row[part] for row in rows))]
            for part in ("input", "middle", "output")
        }


CHAINS: dict[str, tuple[list[tuple[str, float, float, float, int]], ...]] = {
    "one for both": ([("depth", 0.8, 0.0, 1.0, 1)], [("depth", 0.8, 0.0, 1.0, 1)]),
    "two of other kinds, as many hints as pictures": (
        [("depth", 0.8, 0.0, 1.0, 3), ("openpose", 1.5, 0.0, 1.0, 3)],
        [("depth", 0.8, 0.0, 1.0, 3), ("openpose", 1.5, 0.0, 1.0, 3)],
    ),
    "fewer hints than pictures, in a part of the run": (
        [("depth", 0.8, 0.2, 0.9, 2), ("hed/pidi/scribble/ted", -0.5, 0.0, 0.5, 1)],
        [("openpose", 1.0, 0.4, 1.0, 5)],
    ),
    "the positive text alone": ([("openpose", 0.6, 0.0, 0.6, 2)], []),
}


@pytest.mark.parametrize("case", CHAINS)
@torch.inference_mode()
def test_chains_of_kinds_add_up_picture_by_picture(
    case: str, golden_folder: Path, tmp_path: Path
) -> None:
    path, net = flux_file(tmp_path, golden_folder)
    control = load_controlnet(path)
    file = tmp_path / "flux.safetensors"
    weights = golden(golden_folder, "flux").weights
    save_file({name: value.contiguous() for name, value in weights.items()}, file)
    model = loading.load_diffusion_model(str(file))
    model.model.latent_format.latent_channels = 4  # as the recorded network has them
    texts = [
        [[net.inputs["context"][:1] * sign, {"pooled_output": net.inputs["y"][:1] * sign}]]
        for sign in (1.0, -0.5)
    ]
    generator, vae = torch.Generator().manual_seed(1), HintVAE(4)
    known: dict[Any, Tensor] = {}
    shared = {"vae": vae, "format": control.latent_format}
    lists, by_hand = list(texts), list(texts)
    for place, chain in enumerate(CHAINS[case]):
        links = []
        for kind, strength, start, end, count in chain:
            told = SetUnionControlNetType.execute(control, kind)[0]
            key = (kind, count)
            hint = known.setdefault(key, torch.rand(count, 64, 48, 3, generator=generator))
            links.append((kind, strength, start, end, hint))
            apply = ControlNetApplyAdvanced().apply_controlnet
            lists[place] = apply(lists[place], [], told, hint, strength, start, end, vae=vae)[0]
        if links:
            options = by_hand[place][0][1]
            own = ByHand(control.control_model, links, shared)
            by_hand[place] = [[by_hand[place][0][0], {**options, "control": own}]]
    latent = torch.zeros(3, *SIZE)
    start = noise.prepare_noise(latent, 3)

    def sampled(positive: Any, negative: Any) -> Tensor:
        return run.sample_custom(
            model, start, 3.0, samplers.ksampler("euler"), SIGMAS, positive, negative, latent,
            disable_pbar=True, seed=3,
        )  # fmt: skip

    made, expected, plain = sampled(*lists), sampled(*by_hand), sampled(*texts)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-4 * float(expected.std()))
    assert (made - plain).abs().max() > 1e-3 * plain.std()


def test_a_kind_the_network_does_not_tell_is_refused_where_it_is_chosen(
    golden_folder: Path, tmp_path: Path
) -> None:
    control = load_controlnet(flux_file(tmp_path, golden_folder)[0])
    with pytest.raises(ValueError, match=r"tells 3 kinds .*hed/pidi.* found tile; choose"):
        SetUnionControlNetType.execute(control, "tile")
    control.set_extra_arg("control_type", [3])  # by a node of a package
    control.set_cond_hint(torch.rand(1, 3, 64, 48), vae=HintVAE(4))
    with pytest.raises(ValueError, match="tells 3 kinds"):
        control.pre_run(None, float)
