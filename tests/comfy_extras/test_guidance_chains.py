"""Guidance nodes one after another: each acts, or it is said which does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import noise, run, samplers
from comfy_extras import (
    nodes_apg,
    nodes_cfg,
    nodes_custom_sampler,
    nodes_eps,
    nodes_freelunch,
    nodes_fresca,
    nodes_hypertile,
    nodes_lumina2,
    nodes_mahiro,
    nodes_model_advanced,
    nodes_nag,
    nodes_pag,
    nodes_perpneg,
    nodes_sag,
    nodes_slg,
    nodes_tcfg,
    nodes_video_model,
)
from tests.comfy.sampling.support import ClosedFormModel, conditioning, patcher
from tests.comfy_extras.test_model_patches import UNetBase, text

Node = Callable[[Any], Any]

RULES: dict[str, Node] = {
    "RescaleCFG": lambda m: nodes_model_advanced.RescaleCFG().patch(m, 0.7)[0],
    "RenormCFG": lambda m: nodes_lumina2.RenormCFG.execute(m, 100.0, 1.0)[0],
    "PerpNeg": lambda m: nodes_perpneg.PerpNeg.execute(m, text(3), 0.7)[0],
    "Linear": lambda m: nodes_video_model.VideoLinearCFGGuidance().patch(m, 2.0)[0],
    "Triangle": lambda m: nodes_video_model.VideoTriangleCFGGuidance().patch(m, 2.0)[0],
}
OTHERS: dict[str, Node] = {
    "APG": lambda m: nodes_apg.APG.execute(m, 0.4, 3.0, -0.3)[0],
    "CFGZeroStar": lambda m: nodes_cfg.CFGZeroStar.execute(m)[0],
    "CFGNorm": lambda m: nodes_cfg.CFGNorm.execute(m, 0.9)[0],
    "TCFG": lambda m: nodes_tcfg.TCFG.execute(m)[0],
    "Mahiro": lambda m: nodes_mahiro.Mahiro.execute(m)[0],
    "Epsilon Scaling": lambda m: nodes_eps.EpsilonScaling.execute(m, 1.02)[0],
    "TSR": lambda m: nodes_eps.TemporalScoreRescaling.execute(m, 0.8, 1.0)[0],
    "FreSca": lambda m: nodes_fresca.FreSca.execute(m, 0.8, 1.4, 3)[0],
    "PAG": lambda m: nodes_pag.PerturbedAttentionGuidance.execute(m, 2.0)[0],
    "SAG": lambda m: nodes_sag.SelfAttentionGuidance.execute(m, 0.6, 2.0)[0],
    "FreeU": lambda m: nodes_freelunch.FreeU_V2.execute(m, 1.2, 1.3, 0.9, 0.4)[0],
    "NAG": lambda m: nodes_nag.NAGuidance.execute(m, 4.0, 0.5, 1.6)[0],
    "HyperTile": lambda m: nodes_hypertile.HyperTile.execute(m, 32, 2, 1, False)[0],
}


@pytest.fixture(scope="module")
def base() -> UNetBase:
    made = UNetBase()
    made.diffusion_model.in_channels = 4
    return made


def chained(base: UNetBase, nodes: list[Node]) -> Any:
    view = patcher(base)
    for node in nodes:
        view = node(view)
    return view


@torch.inference_mode()
def sampled(base: UNetBase, nodes: list[Node], levels: tuple[float, ...] = (8.0, 0.0)) -> Tensor:
    latent = torch.zeros(1, 4, 8, 12)
    start = noise.prepare_noise(latent, 3)
    return run.sample_custom(
        chained(base, nodes), start, 3.0, samplers.ksampler("euler"),
        torch.tensor(levels), text(1), text(2), latent, disable_pbar=True, seed=3,
    )  # fmt: skip


# CFGNorm takes back what RescaleCFG does to an estimate's length.
WITH_A_RULE = ["RescaleCFG", *(name for name in OTHERS if name != "CFGNorm")]


@pytest.mark.parametrize("names", [WITH_A_RULE, WITH_A_RULE[::-1], ["FreeU", "CFGNorm", "PAG"]])
def test_each_of_many_nodes_acts_in_either_order(base: UNetBase, names: list[str]) -> None:
    table, levels = {**RULES, **OTHERS}, (8.0, 1.0, 0.0)
    whole = sampled(base, [table[name] for name in names], levels)
    assert torch.isfinite(whole).all()
    for name in names:
        rest = sampled(base, [table[other] for other in names if other != name], levels)
        assert (rest - whole).abs().max() > 1e-4, name


def test_of_two_rules_the_last_acts_and_the_node_says_so(
    base: UNetBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("comfy.progress.NOTE_HOOK", said.append)
    alone = {name: sampled(base, [rule]) for name, rule in RULES.items()}
    assert not said
    for first, second in itertools.permutations(RULES, 2):
        made = sampled(base, [RULES[first], OTHERS["APG"], RULES[second]])
        assert torch.equal(made, sampled(base, [OTHERS["APG"], RULES[second]])), (first, second)
        assert len(said) == 1, (first, second)
        assert "only the last of them acts" in said.pop()
    assert not torch.equal(alone["RescaleCFG"], alone["RenormCFG"])


CFG_PP = [name for name in samplers.SAMPLER_NAMES if name.endswith("cfg_pp")]


@pytest.mark.parametrize("name", CFG_PP)
def test_a_cfg_pp_sampler_without_a_negative_text_says_what_stands_in_its_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("comfy.progress.NOTE_HOOK", said.append)
    model, one = patcher(ClosedFormModel()), conditioning([0.5, 0.0, 0.0, 0.0])
    basic = nodes_custom_sampler.BasicGuider.execute(model, one)[0]
    both = nodes_custom_sampler.CFGGuider.execute(model, one, one, 1.0)[0]
    latent, levels = torch.zeros(1, 4, 2, 2), torch.tensor([8.0, 1.0, 0.0])
    for guider, notes in ((both, 0), (basic, 1)):
        start = noise.prepare_noise(latent, 1)
        guider.sample(start, latent, samplers.ksampler(name), levels, disable_pbar=True, seed=1)
        assert len(said) == notes, said
    assert "no negative conditioning" in said[0]


# Guider -> nodes that it does not ask.
UNASKED: dict[str, tuple[Callable[..., Any], list[Node]]] = {
    "DualCFGGuider": (
        lambda m, a, b: nodes_custom_sampler.DualCFGGuider.execute(m, a, b, b, 3.0, 2.0, "regular"),
        [OTHERS["APG"], OTHERS["TCFG"], OTHERS["FreSca"]],
    ),
    "PerpNegGuider": (
        lambda m, a, b: nodes_perpneg.PerpNegGuider.execute(m, a, b, b, 3.0, 1.0),
        [OTHERS["APG"], RULES["RescaleCFG"]],
    ),
    "CFGGuider": (lambda m, a, b: nodes_custom_sampler.CFGGuider.execute(m, a, b, 3.0), []),
}


@pytest.mark.parametrize("name", UNASKED)
def test_a_guider_says_which_nodes_have_no_effect_with_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("comfy.progress.NOTE_HOOK", said.append)
    guider_of, unasked = UNASKED[name]
    latent, texts = torch.zeros(1, 4, 4, 4), (conditioning([0.5] * 4), conditioning([-0.1] * 4))

    def made(*nodes: Node) -> Tensor:
        view = patcher(ClosedFormModel())
        for node in nodes:
            view = node(view)
        return guider_of(view, *texts)[0].sample(
            noise.prepare_noise(latent, 1), latent, samplers.ksampler("euler"),
            torch.tensor([8.0, 1.0, 0.0]), disable_pbar=True, seed=1,
        )  # fmt: skip

    plain = made()
    for node in (OTHERS["Epsilon Scaling"], OTHERS["APG"], RULES["RescaleCFG"]):
        changed = made(node)
        assert torch.equal(changed, plain) == (node in unasked) == bool(said)
        said.clear()
    for node in unasked:
        assert torch.equal(made(node), plain)
        assert len(said) == 1
        assert "has no effect with it" in said.pop()


class BlocksModel(ClosedFormModel):
    """Has the one block ("double_block", 2)."""

    def apply_model(self, *args: Any, transformer_options: Any = None, **kwargs: Any) -> Tensor:
        table = transformer_options.get("patches_replace", {}).get("dit", {})
        if ("double_block", 2) in table:
            table["double_block", 2]({}, {})
        return super().apply_model(*args, transformer_options=transformer_options, **kwargs)


def skipping(double: str, single: str) -> list[Node]:
    return [
        lambda m: nodes_slg.SkipLayerGuidanceDiT.execute(m, 2.0, 0.0, 1.0, double, single)[0],
        lambda m: nodes_slg.SkipLayerGuidanceDiTSimple.execute(m, 0.0, 1.0, double, single)[0],
    ]


@pytest.mark.parametrize(
    ("nodes", "notes"),
    [(skipping("2", "7"), 0), (skipping("3", "2"), 1), ([OTHERS["PAG"]], 1)],
)
def test_a_node_that_replaces_no_block_of_the_network_says_so_once(
    nodes: list[Node], notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("comfy.progress.NOTE_HOOK", said.append)
    latent = torch.zeros(1, 4, 4, 4)
    for node in nodes:
        run.sample_custom(
            node(patcher(BlocksModel())), noise.prepare_noise(latent, 1), 3.0,
            samplers.ksampler("euler"), torch.tensor([8.0, 4.0, 1.0, 0.0]),
            conditioning([0.5] * 4, start_percent=0.2), conditioning([-0.1] * 4), latent,
            disable_pbar=True, seed=1,
        )  # fmt: skip
        assert len(said) == notes, said
        assert not said or "has none of the blocks" in said.pop()
