"""Every kind of weight change, in many shapes and settings, against formulas written out anew.

The formulas are in float64 and share no code with what they check: sums over indices instead of
matrix products, one weight element at a time where that is short.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from comfy.weights.arithmetic import calculate_weight
from comfy.weights.lora import load_lora
from comfy.weights.rounding import stochastic_rounding, string_to_seed

Weights = dict[str, Tensor]
SHAPES = {
    "matrix": (24, 16),
    "wide": (8, 40),
    "square": (16, 16),
    "1x1": (24, 16, 1, 1),
    "3x3": (12, 8, 3, 3),
    "line": (12, 8, 5),
    "box": (8, 8, 3, 3, 3),
}


class Case(NamedTuple):
    """File tensors without the key prefix, and the change W' - W of a whole weight at strength 1.

    Attributes:
        file: Tensors by the part of the key after the prefix.
        delta: weight, strength -> what is added at that strength.
    """

    file: Weights
    delta: Callable[[Tensor, float], Tensor]


def rand(*shape: int) -> Tensor:
    return torch.randn(shape)


def scaled(alpha: float | None, rank: int) -> float:
    return 1.0 if alpha is None else alpha / rank


def with_alpha(file: Weights, alpha: float | None) -> Weights:
    return file if alpha is None else {**file, "alpha": torch.tensor(alpha)}


def flat(t: Tensor) -> Tensor:
    return t.double().reshape(t.shape[0], -1)


def product(shape: tuple[int, ...], alpha: float | None, names: tuple[str, str]) -> Case:
    up, down = rand(shape[0], 4, *[1] * (len(shape) - 2)), rand(4, *shape[1:])
    matrix = torch.einsum("or,ri->oi", flat(up), flat(down)).reshape(shape) * scaled(alpha, 4)
    return Case(with_alpha({names[0]: up, names[1]: down}, alpha), lambda _, s: s * matrix)


def lora(shape: tuple[int, ...], alpha: float | None) -> Case:
    return product(shape, alpha, ("lora_up.weight", "lora_down.weight"))


def peft(shape: tuple[int, ...], alpha: float | None) -> Case:
    return product(shape, alpha, ("lora_B.weight", "lora_A.weight"))


def core(shape: tuple[int, ...], alpha: float | None) -> Case | None:
    if len(shape) != 4:
        return None
    up, down, mid = rand(shape[0], 3, 1, 1), rand(5, shape[1], 1, 1), rand(3, 5, *shape[2:])
    matrix = torch.einsum(
        "or,rshw,si->oihw", flat(up), mid.double(), flat(down)
    ) * scaled(alpha, 5)  # fmt: skip
    file = {"lora_up.weight": up, "lora_down.weight": down, "lora_mid.weight": mid}
    return Case(with_alpha(file, alpha), lambda _, s: s * matrix)


def dora(shape: tuple[int, ...], alpha: float | None, rows: bool) -> Case:
    plain = lora(shape, alpha)
    ones = [1] * (len(shape) - 2)
    size = (shape[0], 1, *ones) if rows else (1, shape[1], *ones)
    magnitude = rand(*size).abs() + 0.5
    axes = [i for i in range(len(shape)) if i != (0 if rows else 1)]
    by_rows = rows or shape[0] == 1

    def delta(weight: Tensor, s: float) -> Tensor:
        changed = weight.double() + plain.delta(weight, 1.0)
        base = weight.double() if by_rows else changed
        norm = base.pow(2).sum(axes, keepdim=True).sqrt()
        return s * (changed * magnitude.double() / norm - weight.double())

    return Case({**plain.file, "dora_scale": magnitude}, delta)


def loha(shape: tuple[int, ...], alpha: float | None) -> Case:
    columns = torch.Size(shape[1:]).numel()
    parts = {
        "hada_w1_a": rand(shape[0], 3), "hada_w1_b": rand(3, columns),
        "hada_w2_a": rand(shape[0], 3), "hada_w2_b": rand(3, columns),
    }  # fmt: skip
    a1, b1, a2, b2 = (p.double() for p in parts.values())
    matrix = torch.einsum("or,ri,os,si->oi", a1, b1, a2, b2).reshape(shape) * scaled(alpha, 3)
    return Case(with_alpha(parts, alpha), lambda _, s: s * matrix)


def loha_core(shape: tuple[int, ...], alpha: float | None) -> Case | None:
    if len(shape) != 4:
        return None
    parts = {}
    for half in ("1", "2"):
        parts |= {f"hada_w{half}_a": rand(3, shape[0]), f"hada_w{half}_b": rand(2, shape[1])}
        parts[f"hada_t{half}"] = rand(3, 2, *shape[2:])
    a1, b1, t1, a2, b2, t2 = (p.double() for p in parts.values())
    matrix = torch.einsum("rshw,ro,si->oihw", t1, a1, b1)
    matrix = matrix * torch.einsum("rshw,ro,si->oihw", t2, a2, b2) * scaled(alpha, 2)
    return Case(with_alpha(parts, alpha), lambda _, s: s * matrix)


def kronecker(a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor:
    """a [p, q], b [m, n, ...] -> [p m, q n, ...], element by element of a."""
    out = torch.zeros(shape, dtype=torch.float64)
    m, n = b.shape[:2]
    for i, j in itertools.product(range(a.shape[0]), range(a.shape[1])):
        out[i * m : (i + 1) * m, j * n : (j + 1) * n] = a[i, j] * b
    return out


def lokr(shape: tuple[int, ...], alpha: float | None, split: str) -> Case | None:
    p, q, m, n = 4, 2, shape[0] // 4, shape[1] // 2
    file: Weights = {}
    rank = None
    if "1" in split:
        file |= {"lokr_w1_a": rand(p, 2), "lokr_w1_b": rand(2, q)}
        w1, rank = file["lokr_w1_a"].double() @ file["lokr_w1_b"].double(), 2
    else:
        file["lokr_w1"] = rand(p, q)
        w1 = file["lokr_w1"].double()
    if "t" in split:
        if len(shape) != 4:
            return None
        file |= {
            "lokr_w2_a": rand(3, m),
            "lokr_w2_b": rand(5, n),
            "lokr_t2": rand(3, 5, *shape[2:]),
        }
        parts = [file[k].double() for k in ("lokr_t2", "lokr_w2_a", "lokr_w2_b")]
        w2, rank = torch.einsum("rshw,ro,si->oihw", *parts), 5
    elif "2" in split:
        if len(shape) != 2:
            return None
        file |= {"lokr_w2_a": rand(m, 3), "lokr_w2_b": rand(3, n)}
        w2, rank = file["lokr_w2_a"].double() @ file["lokr_w2_b"].double(), 3
    else:
        if len(shape) not in (2, 4):
            return None
        file["lokr_w2"] = rand(m, n, *shape[2:])
        w2 = file["lokr_w2"].double()
    matrix = kronecker(w1, w2, shape) * (1.0 if rank is None else scaled(alpha, rank))
    return Case(with_alpha(file, alpha), lambda _, s: s * matrix)


def glora(shape: tuple[int, ...], alpha: float | None, old: bool) -> Case | None:
    inside = torch.Size(shape[2:]).numel()
    if (old and inside != 1) or inside not in (1, 9):
        return None
    o, i, r = shape[0], shape[1], 3
    if old:
        sizes = {"a1": (r, i), "a2": (i, r), "b1": (r, i), "b2": (o, r)}
    elif inside == 1:
        sizes = {"a1": (i, r), "a2": (r, i), "b1": (o, r), "b2": (r, i)}
    else:
        return None
    file = {f"{name}.weight": rand(*size) for name, size in sizes.items()}
    a1, a2, b1, b2 = (t.double() for t in file.values())

    def delta(weight: Tensor, s: float) -> Tensor:
        if old:
            change = b2 @ b1 + flat(weight) @ a2 @ a1
        else:
            change = b1 @ b2 + flat(weight) @ a1 @ a2
        return s * scaled(alpha, r) * change.reshape(shape)

    return Case(with_alpha(file, alpha), delta)


def rotation(block: Tensor, bound: float, norm: Tensor) -> Tensor:
    q = block.double() - block.double().T
    if bound > 0 and norm + 1e-8 > bound:
        q = q * (bound / (norm + 1e-8))
    one = torch.eye(len(q), dtype=torch.float64)
    return torch.linalg.solve((one - q).T, (one + q).T).T


def oft(shape: tuple[int, ...], alpha: float | None) -> Case:
    blocks = rand(shape[0] // 4, 4, 4) * 0.3
    norm = (blocks - blocks.transpose(1, 2)).double().pow(2).sum().sqrt()
    turns = [rotation(b, alpha or 0.0, norm) for b in blocks]

    def delta(weight: Tensor, s: float) -> Tensor:
        out = torch.zeros(shape, dtype=torch.float64)
        one = torch.eye(4, dtype=torch.float64)
        for k, turn in enumerate(turns):
            rows = weight.double()[4 * k : 4 * k + 4]
            out[4 * k : 4 * k + 4] = s * torch.einsum("nm,n...->m...", s * (turn - one), rows)
        return out

    return Case(with_alpha({"oft_blocks": blocks}, alpha), delta)


def boft(shape: tuple[int, ...], alpha: float | None, rescale: bool) -> Case | None:
    rows, size = shape[0], 4
    stages = {8: 2, 16: 3}.get(rows)
    if stages is None:
        return None
    blocks = rand(stages, rows // size, size, size) * 0.3
    norm = (blocks - blocks.transpose(2, 3)).double().pow(2).sum().sqrt()
    file: Weights = {"oft_blocks": blocks}
    if rescale:
        file["rescale"] = rand(rows, *[1] * (len(shape) - 1))

    def delta(weight: Tensor, s: float) -> Tensor:
        turned = flat(weight)
        for stage in range(stages):
            stride = 2**stage * (size // 2)
            # rows that meet in a block: pairs `stride` apart, taken in turn
            order = [
                start + side * stride + step
                for start in range(0, rows, 2 * stride)
                for step in range(stride)
                for side in range(2)
            ]
            mixed = torch.zeros_like(turned)
            for k in range(rows // size):
                where = order[k * size : (k + 1) * size]
                turn = rotation(blocks[stage, k], alpha or 0.0, norm)
                turn = s * turn + (1 - s) * torch.eye(size, dtype=torch.float64)
                mixed[where] = turn @ turned[where]
            turned = mixed
        if rescale:
            turned = turned * file["rescale"].double().reshape(rows, 1)
        return s * (turned - flat(weight)).reshape(shape)

    return Case(with_alpha(file, alpha), delta)


def difference(shape: tuple[int, ...], alpha: float | None) -> Case:
    change = rand(*shape)
    return Case({"diff": change}, lambda _, s: s * change.double())


KINDS: dict[str, Callable[[tuple[int, ...], float | None], Case | None]] = {
    "lora": lora,
    "peft": peft,
    "core": core,
    "dora rows": lambda shape, alpha: dora(shape, alpha, True),
    "dora columns": lambda shape, alpha: dora(shape, alpha, False),
    "loha": loha,
    "loha core": loha_core,
    "lokr full": lambda shape, alpha: lokr(shape, alpha, ""),
    "lokr 1": lambda shape, alpha: lokr(shape, alpha, "1"),
    "lokr 2": lambda shape, alpha: lokr(shape, alpha, "2"),
    "lokr 12": lambda shape, alpha: lokr(shape, alpha, "12"),
    "lokr core": lambda shape, alpha: lokr(shape, alpha, "t"),
    "lokr 1 core": lambda shape, alpha: lokr(shape, alpha, "1t"),
    "glora": lambda shape, alpha: glora(shape, alpha, False),
    "glora old": lambda shape, alpha: glora(shape, alpha, True),
    "oft": oft,
    "boft": lambda shape, alpha: boft(shape, alpha, False),
    "boft rescaled": lambda shape, alpha: boft(shape, alpha, True),
    "difference": difference,
}  # fmt: skip


def seeded(*names: object) -> None:
    torch.manual_seed(zlib.crc32(repr(names).encode()))


def patch_of(case: Case) -> Any:
    return load_lora({f"x.{k}": v for k, v in case.file.items()}, {"x": "w.weight"})["w.weight"]


def flipped(delta: Tensor) -> Tensor:
    return delta.flip(0)


@pytest.mark.parametrize("alpha", [None, 2.0, 0.5], ids=lambda a: f"alpha={a}")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_equals_its_formula(kind: str, shape: str, alpha: float | None) -> None:
    size = SHAPES[shape]
    for strength, strength_model in ((1.0, 1.0), (-0.7, 1.0), (1.6, 0.4)):
        seeded(kind, shape, alpha, strength)
        case = KINDS[kind](size, alpha)
        if case is None:
            return  # the kind has no such shape
        weight = rand(*size)
        patch = (strength, patch_of(case), strength_model, None, None)
        got = calculate_weight([patch], weight.clone(), "w.weight")
        running = weight * strength_model
        want = running.double() + case.delta(running, strength)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_computed_in_float32_whatever_the_types(kind: str, dtype: torch.dtype) -> None:
    size = SHAPES["3x3" if "core" in kind else "square"]
    seeded(kind, dtype)
    case = KINDS[kind](size, 2.0)
    assert case is not None
    file = {k: v if k == "alpha" else v.to(dtype) for k, v in case.file.items()}
    wide = {k: v.float() for k, v in file.items()}
    weight = rand(*size).to(dtype)

    def changed(tensors: Weights) -> Tensor:
        patch = (0.8, patch_of(Case(tensors, case.delta)), 1.0, None, None)
        return calculate_weight([patch], weight.to(torch.float32, copy=True), "w.weight").to(dtype)

    assert torch.equal(changed(file), changed(wide))


@pytest.mark.parametrize("kind", ["lora", "dora rows", "loha", "lokr full", "glora", "difference"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_change_of_a_slice_leaves_the_rest(kind: str, axis: int) -> None:
    seeded(kind, axis)
    weight = rand(40, 40)
    size = (24, 40) if axis == 0 else (40, 24)
    case = KINDS[kind](size, 2.0)
    assert case is not None
    patch = (0.6, patch_of(case), 0.5, (axis, 8, 24), None)
    got = calculate_weight([patch], weight.clone(), "w.weight")
    want = weight.double()
    part = weight.narrow(axis, 8, 24) * 0.5
    want.narrow(axis, 8, 24).copy_(part.double() + case.delta(part, 0.6))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr 12", "glora", "boft", "difference"])
def test_a_function_reorders_what_is_added(kind: str) -> None:
    seeded(kind)
    case = KINDS[kind]((16, 16), None)
    assert case is not None
    weight = rand(16, 16)
    got = calculate_weight([(1.3, patch_of(case), 1.0, None, flipped)], weight.clone(), "w.weight")
    want = weight.double() + case.delta(weight, 1.3).flip(0)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)


def test_patches_of_all_kinds_follow_each_other() -> None:
    seeded("chain")
    cases = [case for make in KINDS.values() if (case := make((16, 16), 2.0)) is not None]
    weight = rand(16, 16) * 0.1
    patches = [(0.1, patch_of(case), 0.9, None, None) for case in cases]
    got = calculate_weight(patches, weight.clone(), "w.weight")
    want = weight.double()
    for case in cases:
        want = want * 0.9
        want = want + case.delta(want, 0.1)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_a_nested_list_is_another_models_weight_with_its_own_patches() -> None:
    seeded("nested")
    case = KINDS["lora"]((6, 5), None)
    assert case is not None
    mine, other = rand(6, 5), rand(6, 5)

    def decode(weight: Tensor, inplace: bool = False, **_: Any) -> Tensor:
        return weight.mul_(3.0) if inplace else weight * 3.0

    nested = [(other, decode), (0.5, patch_of(case), 1.0, None, None)]
    kept = other.clone()
    got = calculate_weight([(0.3, nested, 0.7, None, None)], mine.clone(), "w.weight")
    theirs = other.double() * 3.0 + case.delta(other, 0.5)
    torch.testing.assert_close(got.double(), mine.double() * 0.7 + theirs * 0.3)
    assert torch.equal(other, kept)


@pytest.mark.parametrize("strength", [0.0, 1.0, -2.0])
def test_padded_differences_grow_a_weight_at_every_strength(strength: float) -> None:
    weight, change = torch.ones(2, 3), torch.ones(4, 3)
    patch = (strength, ("diff", (change, {"pad_weight": True})), 1.0, None, None)
    got = calculate_weight([patch], weight, "w")
    want = torch.cat([torch.ones(2, 3) + strength, torch.full((2, 3), strength)])
    assert torch.equal(got, want)


def test_a_grown_lora_pads_first() -> None:
    seeded("grown")
    case = KINDS["lora"]((8, 6), None)
    assert case is not None
    file = {**case.file, "reshape_weight": torch.tensor([8, 6])}
    patch = patch_of(Case(file, case.delta))
    assert patch.calculate_shape("w.weight") == (8, 6)
    weight = rand(5, 4)
    got = calculate_weight([(0.5, patch, 1.0, None, None)], weight, "w.weight")
    padded = torch.zeros(8, 6)
    padded[:5, :4] = weight
    torch.testing.assert_close(got.double(), padded.double() + case.delta(padded, 0.5))


def test_a_model_used_as_lora_is_reordered_too() -> None:
    base, other, running = rand(4, 3), rand(4, 3), rand(4, 3)
    patch = (0.8, ("model_as_lora", (other,)), 1.0, None, flipped)
    got = calculate_weight(
        [patch], running.clone(), "w", original_weights={"w": [(base, None), "later patches"]}
    )
    torch.testing.assert_close(got, running + 0.8 * (other - base).flip(0))


def test_an_adapter_that_returns_nothing_leaves_the_weight() -> None:
    from comfy.weights.adapters import WeightAdapterBase

    class Unable(WeightAdapterBase):
        name = "unable"

        def calculate_weight(self, *_: Any, **__: Any) -> Any:
            return None

    weight = rand(3, 3)
    patches = [
        (1.0, Unable(set(), ()), 1.0, None, None),
        (1.0, (torch.ones(3, 3),), 1.0, None, None),
    ]
    assert torch.equal(calculate_weight(patches, weight.clone(), "w"), weight + 1.0)  # fmt: skip


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("difference", "lora", "peft")])
def test_a_misfit_leaves_the_weight_and_is_named(kind: str, caplog: Any) -> None:
    seeded(kind)
    case = KINDS[kind](SHAPES["3x3" if "core" in kind else "square"], 2.0)
    assert case is not None
    weight = rand(7, 5)
    got = calculate_weight([(0.8, patch_of(case), 1.0, None, None)], weight.clone(), "net.w")
    assert torch.equal(got, weight)
    assert "'net.w'" in caplog.text


def test_biases_norms_and_replacements_of_a_file_find_their_places() -> None:
    lora_file = {
        "x.w_norm": torch.ones(3), "x.b_norm": torch.full((3,), 2.0),
        "y.diff": torch.ones(3, 3), "y.diff_b": torch.full((3,), 3.0),
        "z.set_weight": torch.full((3,), 4.0),
    }  # fmt: skip
    patches = load_lora(lora_file, {name: f"{name}.weight" for name in "xyz"})
    kinds = {key: value[0] for key, value in patches.items()}
    assert kinds == {
        "x.weight": "diff", "x.bias": "diff", "y.weight": "diff", "y.bias": "diff",
        "z.weight": "set",
    }  # fmt: skip
    got = calculate_weight([(0.3, patches["z.weight"], 0.5, None, None)], torch.ones(3), "z.weight")
    assert torch.equal(got, torch.full((3,), 4.0))
    got = calculate_weight([(0.5, patches["y.bias"], 1.0, None, None)], torch.ones(3), "y.bias")
    assert torch.equal(got, torch.full((3,), 2.5))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rounding_at_random_picks_a_neighbour_by_the_seed(dtype: torch.dtype) -> None:
    seeded(dtype)
    value = rand(64, 33) * torch.logspace(-5, 2, 33)
    key = "diffusion_model.blocks.0.weight"
    one, two = (stochastic_rounding(value, dtype, seed=string_to_seed(key)) for _ in range(2))
    assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
    other = stochastic_rounding(value, dtype, seed=string_to_seed(key + "x"))
    assert not torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    grid = every[torch.isfinite(every)].unique()
    clamped = value.half().float().clamp(grid[0], grid[-1])
    above = torch.searchsorted(grid, clamped).clamp(max=len(grid) - 1)
    below = torch.searchsorted(grid, clamped, right=True).sub(1).clamp(min=0)
    got = one.float()
    assert ((got == grid[above]) | (got == grid[below])).all()


def test_a_seed_is_the_checksum_of_character_codes() -> None:
    def slow(text: str) -> int:
        crc = 0xFFFFFFFF
        for character in text:
            crc ^= ord(character)
            for _ in range(8):
                crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
        return crc ^ 0xFFFFFFFF

    for text in ("", "a.weight", "é.weight", "\u4e2d.weight", "\U0001f600"):
        assert string_to_seed(text) == slow(text)
