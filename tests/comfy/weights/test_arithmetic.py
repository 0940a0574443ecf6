"""Every kind of weight change equals the recorded numbers, in float32 and in low precision."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from comfy.weights.arithmetic import calculate_weight
from comfy.weights.lora import load_lora
from comfy.weights.rounding import stochastic_rounding, string_to_seed
from tests.conftest import SHARED

META = SHARED / "golden" / "lora_math_meta.json"
CASES: dict[str, Any] = json.loads(META.read_text("utf-8")) if META.is_file() else {}
PLAIN = [n for n, m in CASES.items() if isinstance(m, dict) and "parsed_as" in m]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

FAILS_IN_REFERENCE = {"lora_bad_shape"}
"""Cases in which keeping the weight is right, not an accident of the reference."""


@pytest.fixture(scope="module")
def data(golden_tensors: Any) -> dict[str, torch.Tensor]:
    return golden_tensors("lora_math.safetensors")


def swap_halves(delta: torch.Tensor) -> torch.Tensor:
    first, second = delta.chunk(2, dim=0)
    return torch.cat([second, first], dim=0)


def patches_of(case: str, data: dict[str, torch.Tensor], target: Any) -> dict[Any, Any]:
    prefix = f"{case}/sd/"
    sd = {k[len(prefix) :]: v for k, v in data.items() if k.startswith(prefix)}
    return load_lora(sd, {"k": target}, log_missing=False)


def computed(
    case: str, data: dict[str, torch.Tensor], dtype: torch.dtype, math: torch.dtype
) -> Any:
    meta = CASES[case]
    function = swap_halves if meta["function"] else None
    offset = tuple(meta["offset"]) if meta["offset"] else None
    patch = patches_of(case, data, "W.weight")["W.weight"]
    weight = data[f"weight/{meta['weight']}"].to(dtype).to(math)
    entry = (meta["strength"], patch, meta["strength_model"], offset, function)
    return calculate_weight([entry], weight.clone(), "W.weight", intermediate_dtype=math)


def assert_equal_to_recording(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    if want.dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    else:  # one unit in the last place
        ulp = torch.finfo(want.dtype).eps
        torch.testing.assert_close(got.float(), want.float(), rtol=1.01 * ulp, atol=1e-6)


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_patch_computed_in_float32_equals_the_recording(
    case: str, dtype: str, data: dict[str, torch.Tensor]
) -> None:
    key = f"{case}/out/{dtype}"
    failed = CASES[case].get("reference_logged_failure_weight_left_unchanged", {})
    if f"{dtype}/compute32" in failed and case not in FAILS_IN_REFERENCE:
        key = f"{case}/out_with_contiguous_kron/{dtype}"
    if key not in data:
        pytest.skip("the reference has no result for this case")
    got = computed(case, data, DTYPES[dtype], torch.float32)
    assert_equal_to_recording(got.to(DTYPES[dtype]), data[key])


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_patch_computed_in_half_precision_is_near_the_recording(
    case: str, dtype: str, data: dict[str, torch.Tensor]
) -> None:
    key = f"{case}/out/{dtype}_native"
    failed = CASES[case].get("reference_logged_failure_weight_left_unchanged", {})
    if key not in data or f"{dtype}/compute_native" in failed:
        pytest.skip("the reference has no result for this case")
    got = computed(case, data, DTYPES[dtype], DTYPES[dtype]).float()
    want = data[key].float()
    # the order of half-precision sums differs; the bound is a few units in the last place of the
    # largest term
    bound = 8 * torch.finfo(DTYPES[dtype]).eps * want.abs().max().item()
    torch.testing.assert_close(got, want, rtol=0, atol=bound)


@pytest.mark.parametrize("case", PLAIN)
def test_parts_of_a_file_are_recognised_as_recorded(
    case: str, data: dict[str, torch.Tensor]
) -> None:
    patches = patches_of(case, data, "W.weight")
    value = patches["W.weight"]
    kind = value[0] if isinstance(value, tuple) else value.name
    assert kind == CASES[case]["parsed_as"]
    assert sorted(set(patches) - {"W.weight"}) == CASES[case]["extra_patch_keys"]


def test_a_padded_difference_grows_the_weight(data: dict[str, torch.Tensor]) -> None:
    meta = CASES["diff_pad_weight"]
    difference = next(
        v for k, v in data.items() if k.startswith("diff_pad_weight/") and "out" not in k
    )
    patch = (meta["strength"], ("diff", (difference, {"pad_weight": True})), 1.0, None, None)
    got = calculate_weight([patch], data["weight/lin"].clone(), "W.weight")
    assert_equal_to_recording(got, data["diff_pad_weight/out/fp32"])


def test_a_model_used_as_lora_adds_its_difference(data: dict[str, torch.Tensor]) -> None:
    base = data["weight/lin"]
    other = base + torch.ones_like(base)
    originals = {"W.weight": [(base, None)]}
    patch = (0.8, ("model_as_lora", (other,)), 1.0, None, None)
    got = calculate_weight([patch], base.clone() * 2, "W.weight", original_weights=originals)
    torch.testing.assert_close(got, base * 2 + 0.8)


def test_merging_two_models_interpolates_their_weights() -> None:
    mine, other = torch.randn(3, 4), torch.randn(3, 4)
    whole = [(other, lambda weight, **_: weight)]
    got = calculate_weight([(0.75, whole, 0.25, None, None)], mine.clone(), "w")
    torch.testing.assert_close(got, mine * 0.25 + other * 0.75)


def test_patches_of_a_weight_run_in_order_and_rescale_what_came_before() -> None:
    weight = torch.ones(2, 2)
    patches = [
        (1.0, (torch.full((2, 2), 3.0),), 1.0, None, None),
        (1.0, (torch.ones(2, 2),), 0.5, None, None),
    ]
    got = calculate_weight(patches, weight, "w")
    assert torch.equal(got, torch.full((2, 2), 3.0))


def test_a_misfitting_patch_leaves_the_weight_and_says_so(caplog: Any) -> None:
    weight = torch.ones(2, 2)
    got = calculate_weight([(1.0, (torch.ones(3, 3),), 1.0, None, None)], weight.clone(), "net.w")
    assert torch.equal(got, weight)
    assert "net.w" in caplog.text
    assert "(3, 3)" in caplog.text


@pytest.mark.parametrize("text", list(CASES.get("string_to_seed", {})))
def test_the_seed_of_a_key_is_its_checksum(text: str) -> None:
    assert string_to_seed(text) == CASES["string_to_seed"][text]


@pytest.mark.parametrize("seed", [0, 1234, 1346105780])
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_float8_rounding_equals_the_recording(
    name: str, seed: int, data: dict[str, torch.Tensor]
) -> None:
    got = stochastic_rounding(data["fp8/in"], getattr(torch, f"float8_{name}"), seed=seed)
    assert torch.equal(got.float(), data[f"fp8/{name}/seed{seed}_as_fp32"])


def test_float8_rounding_is_unbiased() -> None:
    value = torch.full((4096,), 1.03)
    rounded = stochastic_rounding(value, torch.float8_e4m3fn, seed=3).float()
    assert set(rounded.tolist()) == {1.0, 1.125}
    assert abs(rounded.mean().item() - 1.03) < 0.005
