"""Normalised attention guidance: its formula, its one picture, and the calls it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.devices import memory
from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import WeightHook
from comfy.sampling import noise, run, samplers
from comfy.sampling.step_cache import FURTHER
from comfy_extras import nodes_nag, nodes_pag, nodes_perpneg, nodes_sag, nodes_slg
from tests.comfy.sampling.support import patcher
from tests.comfy_extras.test_model_patches import LATENT, UNetBase, patched, sample, text


@pytest.fixture(scope="module")
def base() -> UNetBase:
    return UNetBase()


@pytest.fixture
def model(base: UNetBase) -> Any:
    base.calls.clear()
    return patcher(base)


def test_nag_leads_the_positive_away_from_the_negative(model: Any) -> None:
    plain = sample(model, cfg=1.0)
    model.model.calls.clear()
    same = sample(patched(nodes_nag.NAGuidance, model, 1.0, 0.5, 1.5), cfg=1.0)
    assert model.model.calls[0]["cond_or_uncond"] == [1, 0]
    torch.testing.assert_close(same, plain, rtol=1e-4, atol=1e-4)
    led = sample(patched(nodes_nag.NAGuidance, model, 5.0, 0.5, 1.5), cfg=1.0)
    assert not torch.allclose(led, plain, atol=1e-2)


def nag_of_a_token(z: Tensor, away: Tensor) -> Tensor:
    """Chen et al. 2025, equations 7 to 10, with a scale of 4, a share of 0.3 and a bound of 1.5."""
    far = z + 3.0 * (z - away)
    ratio = far.abs().sum() / z.abs().sum()
    return 0.3 * far * min(ratio, 1.5) / ratio + 0.7 * z


def test_nag_follows_its_paper() -> None:
    """Each token alone; and one picture looks at either text, in every layer."""
    generator = torch.Generator().manual_seed(2)
    picture = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    texts = torch.randn(2, 7, 8, generator=generator, dtype=torch.float64)
    guidance = nodes_nag.AttentionGuidance(4.0, 0.3, 1.5)
    guidance.one_picture = True
    negative, positive = texts
    both, one, told = picture.repeat(2, 1, 1), picture, {"cond_or_uncond": [1, 0]}
    for _ in range(3):

        def look(at: Tensor, text: Tensor) -> Tensor:
            return (at @ text.transpose(-1, -2)).softmax(-1) @ text

        both = both + guidance.cross(look(both, texts), told)
        seen, away = look(one, positive), look(one, negative)
        one = one + torch.stack([nag_of_a_token(*pair) for pair in zip(seen, away)])
        torch.testing.assert_close(both, one.expand_as(both), rtol=1e-12, atol=1e-12)


def test_nag_leads_the_tokens_of_the_picture_only_and_says_when_it_cannot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guidance = nodes_nag.AttentionGuidance(4.0, 0.3, 1.5)
    out = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    both = {"cond_or_uncond": [1, 0]}
    made = guidance.joint(out, {**both, "img_slice": [2, 6]})
    assert torch.equal(made[:, :2], out[:, :2])
    assert not torch.equal(made[1, 2:], out[1, 2:])
    assert torch.equal(made[0], out[0])
    guidance.one_picture = True
    one = guidance.joint(out, {**both, "img_slice": [2, 6]})
    assert torch.equal(one[0, 2:], made[1, 2:])
    assert torch.equal(one[1], made[1])
    assert guidance.joint(out, both) is out
    assert guidance.cross(out, {"cond_or_uncond": [0]}) is out
    assert "no effect" in caplog.text


@pytest.mark.parametrize(("length", "calls"), [(7, [[1, 0], [1, 0]]), (50, [[1], [0], [1], [0]])])
def test_nag_has_both_texts_in_a_call_however_little_memory_there_is(
    model: Any, monkeypatch: pytest.MonkeyPatch, length: int, calls: list[list[int]]
) -> None:
    """But for texts of too different lengths to be joined."""
    negative = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(2))
    negative = negative.repeat(1, -(-length // 7), 1)[:, :length]

    def run_with(view: Any) -> Tensor:
        return run.sample_custom(
            view, noise.prepare_noise(LATENT, 3), 1.0, samplers.ksampler("euler"),
            torch.tensor([8.0, 1.0, 0.0]), text(1), [[negative, {}]], LATENT, disable_pbar=True,
            seed=3,
        )  # fmt: skip

    view = patched(nodes_nag.NAGuidance, model, 5.0, 0.5, 1.5)
    plain = run_with(model)
    together = run_with(view)
    monkeypatch.setattr(memory, "recent_free_memory", lambda *a: 0.0)
    model.model.calls.clear()
    scarce = run_with(view)
    assert [call["cond_or_uncond"] for call in model.model.calls] == calls
    assert torch.equal(scarce, together)
    assert not torch.allclose(scarce, plain, atol=1e-2)


@pytest.mark.parametrize(
    ("counts", "cfg", "area"),
    [((1, 2), 3.0, None), ((3, 1), 1.0, None), ((2, 1), 3.0, (4, 4, 0, 2))],
)
def test_nag_of_several_texts_is_the_same_however_little_memory_there_is(
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int, int],
    cfg: float,
    area: tuple[int, ...] | None,
) -> None:
    lists = [[text(10 * which + number)[0] for number in range(counts[which])] for which in (0, 1)]
    if area is not None:
        lists[0][0][1]["area"] = area
    view = patched(nodes_nag.NAGuidance, model, 5.0, 0.5, 1.5)
    start = noise.prepare_noise(LATENT, 3)
    euler, levels = samplers.ksampler("euler"), torch.tensor([8.0, 0.0])
    monkeypatch.setattr(memory, "recent_free_memory", lambda *_: 1.0)
    made = []
    for largest in (4, 2, 1):  # entries that a call has room for

        def required(shape: Any, most: int = largest, **_: Any) -> float:
            return float(shape[0] > most)

        monkeypatch.setattr(model.model, "memory_required", required)
        made.append(
            run.sample_custom(view, start, cfg, euler, levels, *lists, LATENT, disable_pbar=True)
        )
    for scarce in made[1:]:
        torch.testing.assert_close(scarce, made[0], rtol=0, atol=1e-4)


def test_the_negative_text_of_nag_still_makes_an_estimate_where_that_counts(model: Any) -> None:
    seen: list[float] = []
    view = patched(nodes_nag.NAGuidance, model, 5.0, 0.5, 1.5)

    def note(facts: dict[str, Any]) -> Tensor:
        seen.append(float((facts["cond_denoised"] - facts["uncond_denoised"]).abs().max()))
        return facts["denoised"]  # type: ignore[no-any-return]

    view.set_model_sampler_post_cfg_function(note)
    sample(view, cfg=3.0)
    assert min(seen) > 1e-3
    seen.clear()
    sample(view, cfg=1.0)
    assert max(seen) < 1e-4


def test_nag_keeps_nothing_after_a_run_and_nothing_of_another_level() -> None:
    guidance = nodes_nag.AttentionGuidance(4.0, 0.3, 1.5)
    out = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(1))

    def told(order: list[int], sigma: float) -> dict[str, Any]:
        return {"cond_or_uncond": order, "sigmas": torch.tensor([sigma])}

    guidance.cross(-out, told([1], 2.0))
    assert not torch.equal(guidance.cross(out, told([0], 2.0)), out)
    assert guidance.cross(out, told([0], 1.0)) is out
    guidance.cross(-out, told([1], 2.0))
    guidance.forget()
    assert guidance.cross(out, told([0], 2.0)) is out


def test_nag_leaves_the_estimates_of_other_guidance_alone(caplog: pytest.LogCaptureFixture) -> None:
    """With little memory too, where the negative's results of the calls before are kept."""
    guidance = nodes_nag.AttentionGuidance(4.0, 0.3, 1.5)
    out = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(1))
    guidance.cross(-out, {"cond_or_uncond": [1], "sigmas": torch.tensor([2.0])})
    blurred = {"cond_or_uncond": [0], "sigmas": torch.tensor([2.0]), FURTHER: "another node"}
    assert guidance.cross(out, blurred) is out
    guidance.forget()
    assert guidance.cross(out, blurred) is out
    assert "no effect" not in caplog.text


@pytest.mark.parametrize(
    ("node", "settings"),
    [
        (nodes_pag.PerturbedAttentionGuidance, (2.0,)),
        (nodes_sag.SelfAttentionGuidance, (0.5, 2.0)),
        (nodes_perpneg.PerpNeg, (text(5), 1.0)),
    ],
)
def test_nag_beside_other_guidance_is_the_same_however_little_memory_there_is(
    node: Any, settings: tuple[Any, ...], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = patched(nodes_nag.NAGuidance, patched(node, model, *settings), 5.0, 0.5, 1.5)
    plenty = sample(view, cfg=3.0)
    monkeypatch.setattr(memory, "recent_free_memory", lambda *_: 0.0)
    torch.testing.assert_close(sample(view, cfg=3.0), plenty, rtol=0, atol=1e-4)


@pytest.mark.parametrize("free", [None, 0.0])
def test_nag_leads_the_positive_beside_a_negative_without_some_layers(
    free: float | None, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The UNet has none of these layers, so all but the number of estimates stays as it was."""
    if free is not None:
        monkeypatch.setattr(memory, "recent_free_memory", lambda *_: free)
    led = patched(nodes_nag.NAGuidance, model, 5.0, 0.5, 1.5)
    simple = nodes_slg.SkipLayerGuidanceDiTSimple
    for view in (
        simple.execute(led, 0.0, 1.0, "7", "")[0],
        patched(nodes_nag.NAGuidance, simple.execute(model, 0.0, 1.0, "7", "")[0], 5.0, 0.5, 1.5),
    ):
        torch.testing.assert_close(sample(view, cfg=3.0), sample(led, cfg=3.0), rtol=0, atol=1e-4)
    assert "normalised attention guidance had no effect" not in caplog.text


@pytest.mark.parametrize("hooked", [0, 1])
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_nag_finds_the_negative_where_one_of_the_texts_has_hooks(
    hooked: int, cfg: float, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts with other weights have calls of their own; here the weights are the same."""
    hooks = HookGroup()
    hooks.add(WeightHook())
    view = patched(nodes_nag.NAGuidance, model, 5.0, 0.5, 1.5)

    def run_with(*lists: Any) -> Tensor:
        return run.sample_custom(
            view, noise.prepare_noise(LATENT, 3), cfg, samplers.ksampler("euler"),
            torch.tensor([8.0, 1.0, 0.0]), *lists, LATENT, disable_pbar=True, seed=3,
        )  # fmt: skip

    lists: list[Any] = [text(1), text(2)]
    lists[hooked] = [[lists[hooked][0][0], {"hooks": hooks}]]
    apart = run_with(*lists)
    assert "no effect" not in caplog.text
    if cfg != 1.0:  # else the texts look from one picture, if they share a call
        torch.testing.assert_close(apart, run_with(text(1), text(2)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("free", [None, 0.0])
def test_nag_leads_a_positive_that_cannot_share_the_call_of_another(
    cfg: float, free: float | None, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    if free is not None:
        monkeypatch.setattr(memory, "recent_free_memory", lambda *_: free)
    long = [[text(4)[0][0].repeat(1, 9, 1), {}]]
    view = patched(nodes_nag.NAGuidance, model, 5.0, 0.5, 1.5)

    def run_with(positive: Any) -> Tensor:
        return run.sample_custom(
            view, noise.prepare_noise(LATENT, 3), cfg, samplers.ksampler("euler"),
            torch.tensor([8.0, 0.0]), positive, text(2), LATENT, disable_pbar=True, seed=3,
        )  # fmt: skip

    mean = (run_with(text(1)) + run_with(long)) / 2
    both = run_with(text(1) + long)
    assert "no effect" not in caplog.text
    if cfg != 1.0:  # else a negative that shares a call has the positive's picture
        torch.testing.assert_close(both, mean, rtol=0, atol=1e-4)
