"""Random conditioning lists, with hooks and their schedules, against a plain reading of what they
mean."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import conds
from comfy.patching.hooks import EnumHookMode
from comfy.sampling import batching, conditioning, run, samplers
from comfy_extras import nodes_hooks
from tests.comfy.sampling.conditioning_oracle import Entry, Lists, evaluate
from tests.comfy.sampling.support import CPU, TestModel, context, patcher
from tests.comfy.sampling.test_hooked import WeightedModel, group, weight_hook

SIGMAS = (14.6, 5.0, 1.0, 0.3, 0.03)


def estimate(x: Tensor, text: Tensor) -> Tensor:
    """Depends on latent, text and on the place within the cut."""
    axes = x.ndim - 2
    made = x * 0.5 + text.mean(dim=(1, 2)).reshape(-1, 1, *[1] * axes)
    for axis, size in enumerate(x.shape[2:]):
        places = torch.arange(size, dtype=x.dtype) * 0.01 * (axis + 1)
        made = made + places.reshape(-1, *[1] * (axes - 1 - axis))
    return made


class PlacesModel(TestModel):
    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        return {"c_crossattn": conds.CONDCrossAttn(kwargs["cross_attn"])}

    def apply_model(self, x: Tensor, t: Tensor, c_crossattn: Tensor, **kw: Any) -> Tensor:
        return estimate(x, c_crossattn)


def random_area(r: random.Random, dims: list[int]) -> tuple[Any, ...]:
    if r.random() < 0.5:
        starts = [r.randrange(dim) for dim in dims]
        return (*(r.randint(1, dim + 2) for dim in dims), *starts)
    sizes = [r.random() for _ in dims]
    return ("percentage", *sizes, *(r.random() * (1 - size) for size in sizes))


def random_mask(r: random.Random, dims: list[int], batch: int) -> Tensor:
    size = dims if r.random() < 0.5 else [r.randint(1, 2 * dim) for dim in dims]
    generator = torch.Generator().manual_seed(r.randrange(1 << 30))
    mask = torch.rand(r.choice([1, batch]), *size, generator=generator)
    if r.random() < 0.5:  # a box
        corner = [r.randrange(side) for side in size]
        box = torch.zeros_like(mask)
        box[(..., *(slice(c, c + r.randint(1, s)) for c, s in zip(corner, size)))] = 1.0
        mask = mask * box
    return mask


def random_entry(r: random.Random, dims: list[int], batch: int) -> Entry:
    text = torch.full((1, r.choice([1, 7, 77, 154, 231]), 4), float(r.randint(0, 5)))
    entry: Entry = {"context": text}
    if r.random() < 0.5:
        entry["area"] = random_area(r, dims)
    if r.random() < 0.3:
        entry |= {"mask": random_mask(r, dims, batch), "mask_strength": r.choice([1.0, 0.3])}
        # Bounds are those of pictures.
        entry["set_area_to_bounds"] = len(dims) == 2 and r.random() < 0.5
    choices = {
        "strength": r.choice([0.0, 2.0]), "start_percent": r.random(), "end_percent": r.random(),
        "clip_start_percent": r.random() / 2, "clip_end_percent": 0.5 + r.random() / 2,
        "default": True,
    }  # fmt: skip
    return entry | {name: value for name, value in choices.items() if r.random() < 0.15}


def graph_form(entries: list[Entry]) -> list[Any]:
    return [[e["context"], {k: v for k, v in e.items() if k != "context"}] for e in entries]


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_lists_mean_what_they_say(axes: int) -> None:
    for seed in range(60):
        r = random.Random(seed)
        batch, dims = r.randint(1, 3), [r.randint(1, 20 if axes < 3 else 9) for _ in range(axes)]
        names = ("positive", "negative", "middle")[: r.choice([1, 2, 2, 3])]
        lists: Lists = {
            name: [random_entry(r, dims, batch) for _ in range(r.randint(0, 4))] for name in names
        }
        x = torch.randn(batch, 4, *dims, generator=torch.Generator().manual_seed(seed))
        model = PlacesModel()
        sigma = torch.full((batch,), r.choice(SIGMAS))
        ready = {name: conditioning.convert_cond(graph_form(lists[name])) for name in names}
        ready = conditioning.process_conds(model, x, ready, CPU)
        found = batching.calc_cond_batch(model, list(ready.values()), x, sigma, {})
        expected = evaluate(
            lists, x, float(sigma[0]), model.model_sampling.percent_to_sigma,
            lambda entry, cut: estimate(cut, entry["context"].double()),
        )  # fmt: skip
        for made, name in zip(found, names):
            difference = (made - expected[name]).abs().max()
            assert difference < 1e-4, (axes, seed, name, float(difference))


class Staircase:
    """A schedule of strengths: frames of (strength, start, steps that it lasts in any case)."""

    def __init__(self, frames: list[tuple[float, float, int]]) -> None:
        self.frames = sorted(frames, key=lambda frame: frame[1])
        self.place, self.steps, self.last = 0, 0, -1.0

    def strength(self, sigma: float, highest: float, to_sigma: Any) -> float:
        if not self.frames:
            return 1.0

        def lasting(place: int) -> int:
            return 0 if to_sigma(self.frames[place][1]) > highest else self.frames[place][2]

        if sigma != self.last:
            if self.steps >= lasting(self.place):
                while self.place + 1 < len(self.frames):
                    if to_sigma(self.frames[self.place + 1][1]) < sigma:
                        break
                    self.place, self.steps = self.place + 1, 0
                    if lasting(self.place):
                        break
            self.steps, self.last = self.steps + 1, sigma
        return self.frames[self.place][0]


def node(name: str, **inputs: Any) -> Any:
    made = nodes_hooks.NODE_CLASS_MAPPINGS[name]()
    return getattr(made, made.FUNCTION)(**inputs)


Schedule = tuple[Any, list[tuple[float, float, int]]]


def random_schedule(r: random.Random) -> Schedule:
    """Keyframes of the nodes, and what they mean."""
    keyframes, frames = None, []
    for _ in range(r.randint(1, 3)):
        first, last = sorted((r.random(), r.random()))
        given = {"start_percent": first, "prev_hook_kf": keyframes}
        if r.random() < 0.5:
            strength = r.choice([0.0, 0.5, 2.0, -1.0])
            (keyframes,) = node("CreateHookKeyframe", strength_mult=strength, **given)
            frames.append((strength, first, 1))
        else:
            count, end = r.randint(2, 5), r.choice([0.0, 2.0])
            (keyframes,) = node(
                "CreateHookKeyframesInterpolated", strength_start=1.0, strength_end=end,
                interpolation="ease_in", end_percent=last, keyframes_count=count, **given,
            )  # fmt: skip
            for step in range(count):
                share = step / (count - 1)
                place = first + (last - first) * share
                frames.append((1.0 + (end - 1.0) * share**2, place, int(step == 0)))
    return keyframes, frames


def random_groups(r: random.Random) -> list[tuple[Any, list[tuple[float, Staircase]]]]:
    """Groups of hooks with (difference, schedule) of each hook."""
    groups = []
    for size in (1.0, 10.0, 100.0):
        hooks, stairs = group(weight_hook(size, r.choice([0.5, 1.0]))), Staircase([])
        strength = hooks.hooks[0].strength_model
        if r.random() < 0.7:
            keyframes, frames = random_schedule(r)
            (hooks,) = node("SetHookKeyframes", hooks=hooks, hook_kf=keyframes)
            stairs = Staircase(frames)
        groups.append((hooks, [(size * strength, stairs)]))
    first, second = r.sample(groups, 2)
    (both,) = node("CombineHooks2", hooks_A=first[0], hooks_B=second[0])
    return [*groups, (both, first[1] + second[1])]


def random_hooked(r: random.Random, made: Lists) -> Iterator[tuple[str, list[Any]]]:
    """Lists of the conditioning nodes for hooks; `made` is told what they mean."""
    groups = random_groups(r)
    for name in ("positive", "negative"):
        made[name], whole = [], []
        for place in range(r.randint(1, 3)):
            hooks, meaning = r.choice([*groups, (None, [])])
            is_default = place > 0 and r.random() < 0.3
            text = context([float(r.randint(0, 5))] * 4)
            entry: Entry = {"context": text, "hooked": meaning}
            if is_default:
                entry["default"] = True
                (whole,) = node(
                    "ConditioningSetDefaultCombine", cond=whole, cond_DEFAULT=[[text, {}]],
                    hooks=hooks,
                )  # fmt: skip
            else:
                start, end = sorted((r.random(), r.random())) if r.random() < 0.5 else (0.0, 1.0)
                span, before, after = node(
                    "ConditioningTimestepsRange", start_percent=start, end_percent=end
                )
                chosen = r.choice([span, before, after])
                entry |= {"start_percent": chosen[0], "end_percent": chosen[1]}
                options: dict[str, Any] = {"strength": 0.5, "set_cond_area": "mask bounds"}
                if r.random() < 0.4:
                    entry["mask"] = random_mask(r, [8, 8], 1)
                    entry |= {"mask_strength": 0.5, "set_area_to_bounds": True}
                (whole,) = node(
                    "ConditioningSetPropertiesAndCombine", cond=whole, cond_NEW=[[text, {}]],
                    mask=entry.get("mask"), hooks=hooks, timesteps=chosen, **options,
                )  # fmt: skip
            made[name].append(entry)
        yield name, whole


@pytest.mark.parametrize("mode", list(EnumHookMode))
def test_hooks_follow_their_schedules_whatever_shares_a_step(
    mode: EnumHookMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, list[Tensor]]] = []
    original = batching.calc_cond_batch

    def noted(model: Any, lists: Any, x: Tensor, t: Tensor, options: Any) -> list[Tensor]:
        out = original(model, lists, x, t, options)
        seen.append((float(t[0]), [one.double() for one in out]))
        return out

    monkeypatch.setattr(batching, "calc_cond_batch", noted)
    latent = torch.zeros(1, 4, 8, 8)
    for seed in range(30):
        r = random.Random(seed)
        model = patcher(WeightedModel())
        model.set_hook_mode(mode)
        to_sigma = model.model.model_sampling.percent_to_sigma
        lists: Lists = {}
        given = dict(random_hooked(r, lists))
        levels = sorted(r.sample([14.6, 9.0, 5.0, 2.0, 1.0, 0.4, 0.1], 4))[::-1]
        cfg, solver = r.choice([1.0, 3.0]), r.choice(["euler", "heun"])
        seen.clear()
        run.sample_custom(
            model, latent, cfg, samplers.ksampler(solver), torch.tensor([*levels, 0.0]),
            given["positive"], given["negative"], latent, disable_pbar=True, seed=0,
        )  # fmt: skip
        for sigma, found in seen:

            def predict(
                entry: Entry, cut: Tensor, place: Any = (sigma, levels[0], to_sigma)
            ) -> Any:
                amounts = [size * stairs.strength(*place) for size, stairs in entry["hooked"]]
                return torch.full_like(cut, 1.0 + sum(amounts) + float(entry["context"].mean()))

            names = ("positive", "negative")[: 1 if cfg == 1.0 else 2]
            expected = evaluate(lists, latent, sigma, to_sigma, predict, only=names)
            for name, made in zip(names, found):
                difference = (made - expected[name]).abs().max()
                assert difference < 1e-3, (seed, name, sigma, float(difference))
