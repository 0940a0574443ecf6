"""Random chains of control networks on random conditioning, against a plain reading of them."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comfy import conds, resize
from comfy.control.base import PARTS, StrengthType
from comfy.control.networks import ControlNet
from comfy.sampling import batching, conditioning
from comfy_nodes.control import ControlNetApply, ControlNetApplyAdvanced
from tests.comfy.sampling.conditioning_oracle import Entry, Lists, evaluate
from tests.comfy.sampling.support import CPU, TestModel
from tests.comfy.sampling.test_random_conditioning import graph_form, random_entry

DECAY = 0.7  # of what later residuals count
CHAIN, TO_OTHERS = "chain", "to others"


def shown(control: dict[str, list[Tensor | None]]) -> Any:
    """What the model makes of residuals."""
    parts = [
        residual * DECAY**place * (number + 1)
        for number, part in enumerate(PARTS)
        for place, residual in enumerate(control[part])
        if residual is not None
    ]
    return sum(parts) if parts else 0.0


class ControlledModel(TestModel):
    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        return {"c_crossattn": conds.CONDCrossAttn(kwargs["cross_attn"])}

    def apply_model(
        self, x: Tensor, t: Tensor, c_crossattn: Tensor, control: Any = None, **kw: Any
    ) -> Tensor:
        made = x * 0.5 + c_crossattn.mean(dim=(1, 2)).reshape(-1, 1, 1, 1)
        return made if control is None else made + shown(control)


class Network(nn.Module):
    """Residuals of latent, hint, level and text, some of them left out."""

    dtype = torch.float32

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        counts = {"input": r.randint(1, 3), "middle": 1, "output": r.randint(0, 3)}
        self.factors = {
            part: [
                None if r.random() < 0.2 else [r.uniform(-1, 1) for _ in range(4)]
                for _ in range(count)
            ]
            for part, count in counts.items()
        }

    def forward(
        self, x: Tensor, hint: Tensor, timesteps: Tensor, context: Tensor, **kw: Any
    ) -> dict[str, list[Tensor | None]]:
        seen = torch.nn.functional.avg_pool2d(hint.mean(1, keepdim=True), 8)
        level = (timesteps / 1000).reshape(-1, 1, 1, 1)
        text = context.mean(dim=(1, 2)).reshape(-1, 1, 1, 1)
        facts = (x, seen, level, text)
        return {
            part: [None if f is None else sum(a * b for a, b in zip(f, facts)) for f in factors]
            for part, factors in self.factors.items()
        }


def apply_randomly(r: random.Random, lists: Lists, graph: dict[str, Any], nets: list[Any]) -> None:
    """One more control network, by one of both nodes; entries are told what it means."""
    net, strength = r.choice(nets), r.choice([0.0, 0.5, 1.0, 2.0])
    limits = (r.choice([0.0, 0.3]), r.choice([1.0, 0.6]))
    hint = torch.rand(r.randint(1, 4), r.randint(8, 80), r.randint(8, 80), 3)
    if r.random() < 0.5:
        names = ["positive", "negative"]
        made = ControlNetApplyAdvanced().apply_controlnet(
            *graph.values(), net, hint, strength, *limits
        )
    else:
        names, limits = [r.choice(["positive", "negative"])], (0.0, 1.0)
        made = ControlNetApply().apply_controlnet(graph[names[0]], net, hint, strength)
    graph |= dict(zip(names, made))
    for entry in [entry for name in names for entry in lists[name] if strength]:
        entry[CHAIN] = [*entry.get(CHAIN, ()), (net, strength, limits, hint.movedim(-1, 1))]
        entry[TO_OTHERS] = len(names) == 1


def share(lists: Lists) -> None:
    """What the positive list lends to the negative one, among entries without an area."""
    bounds = [e for e in lists["negative"] if not e.get("area") and not e["set_area_to_bounds"]]
    lent = [
        e[CHAIN]
        for e in lists["positive"]
        if e.get(TO_OTHERS) and not e.get("area") and not e["set_area_to_bounds"]
    ]
    if bounds and not any(CHAIN in entry for entry in bounds):
        for place, chain in enumerate(lent):
            bounds[place % len(bounds)][CHAIN] = chain


def estimate(entry: Entry, cut: Tensor, sigma: float, sampling: Any) -> Tensor:
    """One entry's estimate with its chain, one link after the other."""
    text = entry["context"].double().expand(len(cut), -1, -1)
    made = cut * 0.5 + text.mean(dim=(1, 2)).reshape(-1, 1, 1, 1)
    timestep = sampling.timestep(torch.tensor([sigma])).double().expand(len(cut))
    for net, strength, (start, end), hint in entry.get(CHAIN, ()):
        to_sigma = sampling.percent_to_sigma
        if not to_sigma(end) <= sigma <= to_sigma(start):
            continue
        rows, columns = cut.shape[-2:]
        hint = resize.common_upscale(hint, columns * 8, rows * 8, "nearest-exact", "center")
        hint = hint[[item % len(hint) for item in range(len(cut))]].double()
        control = net.control_model(cut / (sigma**2 + 1) ** 0.5, hint, timestep, text)
        for residuals in control.values():
            for place, residual in enumerate(residuals):
                if residual is not None:
                    if net.global_average_pooling:
                        residual = residual.mean(dim=(2, 3), keepdim=True).expand_as(residual)
                    grows = net.strength_type == StrengthType.LINEAR_UP
                    power = len(residuals) - place if grows else 1
                    residuals[place] = residual * strength**power
        made = made + shown(control)
    return made


def test_chains_add_up_whatever_their_hints_ranges_and_areas() -> None:
    for seed in range(50):
        r = random.Random(seed)
        torch.manual_seed(seed)
        batch, dims = r.randint(1, 3), [r.randint(2, 12), r.randint(2, 12)]
        names = ("positive", "negative")
        lists: Lists = {
            name: [
                {"set_area_to_bounds": False, **random_entry(r, dims, batch)}
                for _ in range(r.randint(1, 3))
            ]
            for name in names
        }
        graph = {name: graph_form(lists[name]) for name in names}
        nets = [ControlNet(Network(r), load_device=CPU) for _ in range(3)]
        nets[0].global_average_pooling = True
        nets[1].strength_type = StrengthType.LINEAR_UP
        for _ in range(r.randint(1, 4)):
            apply_randomly(r, lists, graph, nets)
        x = torch.randn(batch, 4, *dims)
        model = ControlledModel()
        sampling = model.model_sampling
        sigma = torch.full((batch,), r.choice([14.6, 5.0, 1.0, 0.3]))
        ready = {name: conditioning.convert_cond(graph[name]) for name in names}
        ready = conditioning.process_conds(model, x, ready, CPU)
        together = batching.calc_cond_batch(model, list(ready.values()), x, sigma, {})
        apart = [batching.calc_cond_batch(model, [one], x, sigma, {})[0] for one in ready.values()]
        share(lists)
        expected = evaluate(
            lists, x, float(sigma[0]), sampling.percent_to_sigma,
            partial(estimate, sigma=float(sigma[0]), sampling=sampling),
        )  # fmt: skip
        for made in (together, apart):
            for name, one in zip(names, made):
                difference = (one - expected[name]).abs().max()
                assert difference < 1e-3, (seed, name, float(difference))
