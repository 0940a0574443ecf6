"""Every attention back end computes the same; choice, overrides and masks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from comfy import cli_args
from comfy.devices.policies import MemoryPolicy, PrecisionPolicy
from comfy.devices.runtime import build_runtime, install_runtime
from comfy.nn import attention
from comfy.nn.attention import kernels
from utils import policies

ROWS = [row for row in attention.BACKENDS if row.is_available()]


def inputs(length: int = 70, keys: int = 77, heads: int = 4, dim: int = 16):
    torch.manual_seed(0)
    return (torch.randn(2, size, heads * dim) for size in (length, keys, keys))


def expected(q, k, v, heads, mask=None):
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def masks():
    torch.manual_seed(1)
    return {
        "none": None,
        "boolean": torch.rand(70, 77) > 0.3,
        "additive per text": torch.randn(2, 70, 77),
        "per head": torch.randn(2, 4, 70, 77),
        "keys only": torch.randn(2, 1, 1, 77),
    }


@pytest.mark.parametrize("name", list(masks()))
@pytest.mark.parametrize(
    "row",
    [*ROWS, attention.Backend("basic", attention.attention_basic, bool)],
    ids=lambda row: row.name,
)
def test_every_back_end_computes_the_same(row, name) -> None:
    q, k, v = inputs()
    mask = masks()[name]
    four = attention.expand_mask(mask)
    out = row.function(q, k, v, 4, mask)
    torch.testing.assert_close(out, expected(q, k, v, 4, four), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_heads_may_come_and_go_apart(row) -> None:
    q, k, v = inputs()
    split = [attention.split_heads(x, 4) for x in (q, k, v)]
    out = row.function(*split, 4, skip_reshape=True, skip_output_reshape=True)
    assert out.shape == (2, 4, 70, 16)
    torch.testing.assert_close(
        attention.merge_heads(out), expected(q, k, v, 4), rtol=1e-5, atol=1e-5
    )


def test_key_heads_may_be_shared_by_query_heads() -> None:
    q, k, v = inputs()
    few_k, few_v = k[..., :32], v[..., :32]
    full = [x.unflatten(-1, (2, 16)).repeat_interleave(2, dim=2).flatten(2) for x in (few_k, few_v)]
    out = attention.optimized_attention(q, few_k, few_v, 4)
    torch.testing.assert_close(out, expected(q, *full, 4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [kernels.split, kernels.sub_quadratic])
def test_chunks_do_not_change_the_result(kernel) -> None:
    q, k, v = (x.unflatten(-1, (4, 16)).transpose(1, 2) for x in inputs())
    mask = torch.rand(1, 1, 70, 77) > 0.5
    mask[..., 0] = True
    small = (
        {"budget_bytes": 30000} if kernel is kernels.split else {"query_chunk": 32, "key_chunk": 10}
    )
    torch.testing.assert_close(
        kernel(q, k, v, mask, **small),
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        rtol=1e-5,
        atol=1e-5,
    )


def test_few_keys_on_a_cpu_take_the_plain_product(monkeypatch) -> None:
    called, split = [], kernels.split
    monkeypatch.setattr(kernels, "split", lambda *a, **k: called.append(1) or split(*a, **k))
    q, k, v = inputs()
    attention.attention_pytorch(q, k, v, 4)
    assert called


def test_an_unknown_back_end_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'fast'.*pytorch"):
        attention.choose(attention.AttentionPolicy("fast"))


def test_a_back_end_can_be_asked_for() -> None:
    assert (
        attention.choose(attention.AttentionPolicy("split")).function is attention.attention_split
    )


def test_an_override_may_call_any_attention_function() -> None:
    q, k, v = inputs()

    def override(function, *args, **kwargs):
        assert function is attention.optimized_attention.__wrapped__
        return attention.attention_split(*args, **kwargs) * 2

    options = {"optimized_attention_override": override}
    out = attention.optimized_attention(q, k, v, 4, transformer_options=options)
    torch.testing.assert_close(out, expected(q, k, v, 4) * 2, rtol=1e-5, atol=1e-5)


def test_half_precision_scores_can_be_raised_to_single() -> None:
    q, k, v = (x.bfloat16() for x in inputs())
    out = attention.attention_basic(q, k, v, 4, attn_precision=torch.float32)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("function", [attention.attention_split, attention.attention_sub_quad])
def test_flags_decide_whether_scores_are_raised(function) -> None:
    q, k, v = (3 * x.bfloat16() for x in inputs())

    def apply(asked: torch.dtype | None, **flags: bool) -> torch.Tensor:
        install_runtime(build_runtime(MemoryPolicy(cpu=True), PrecisionPolicy(**flags)))
        try:
            return function(q, k, v, 4, attn_precision=asked)
        finally:
            install_runtime(None)

    plain, raised = apply(None), apply(torch.float32)
    assert not torch.equal(plain, raised)
    assert torch.equal(apply(None, force_upcast_attention=True), raised)
    assert torch.equal(apply(torch.float32, dont_upcast_attention=True), plain)


def test_registered_functions_are_found_by_name() -> None:
    assert attention.get_attention_function("pytorch") is attention.attention_pytorch
    assert attention.get_attention_function("nothing", None) is None
    with pytest.raises(KeyError, match="nothing"):
        attention.get_attention_function("nothing")


def test_a_width_that_heads_do_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"64.*5"):
        attention.split_heads(torch.zeros(1, 2, 64), 5)


@pytest.mark.parametrize("flag", ["split", "quad", "pytorch"])
def test_a_back_end_asked_for_at_start_is_in_the_table(flag: str) -> None:
    args = cli_args.build_parser().parse_args([f"--use-{flag}-cross-attention"])
    asked = policies.precision_policy(args).attention
    assert attention.choose(attention.AttentionPolicy(asked)).name == asked


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_that_may_attend_to_nothing_stay_finite(row, dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs(length=5, keys=9))
    out = row.function(q, k, v, 4, torch.zeros(5, 9, dtype=torch.bool))
    assert out.dtype == dtype
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("kernel", [kernels.split, kernels.sub_quadratic])
def test_scores_of_many_heads_stay_within_their_bytes(kernel, monkeypatch) -> None:
    q, k, v = (attention.split_heads(x, 8) for x in inputs(length=64, keys=64, heads=8, dim=4))
    whole = kernel(q, k, v)
    largest = []
    original = kernels._scores

    def watched(*args):
        made = original(*args)
        largest.append(made.numel() * made.element_size())
        return made

    monkeypatch.setattr(kernels, "SPLIT_BYTES", 1 << 15)
    monkeypatch.setattr(kernels, "_scores", watched)
    options = {"budget_bytes": 1 << 15} if kernel is kernels.split else {}
    torch.testing.assert_close(kernel(q, k, v, **options), whole)
    assert max(largest) <= 1 << 15


@pytest.mark.parametrize("batches", [(7, 7, None), (7, 7, 7), (7, 7, 1), (7, 1, None)])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_more_items_than_an_accelerator_takes_go_in_several_calls(row, batches, monkeypatch):
    queries, keys, masks = batches
    q, k = torch.randn(queries, 4, 5, 16), torch.randn(keys, 4, 9, 16).expand(queries, -1, -1, -1)
    mask = None if masks is None else torch.randn(masks, 1, 5, 9)
    options = {"skip_reshape": True, "skip_output_reshape": True}
    whole = row.function(q, k, k, 4, mask, **options)
    monkeypatch.setattr(kernels, "LARGEST_BATCH", 3)
    torch.testing.assert_close(row.function(q, k, k, 4, mask, **options), whole)


@pytest.mark.parametrize("shape", [(0, 5, 9), (2, 0, 9), (2, 5, 0)])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_items_queries_or_keys_make_nothing(row, shape) -> None:
    items, queries, keys = shape
    q, k, v = (torch.ones(items, length, 64) for length in (queries, keys, keys))
    made = row.function(q, k, v, 4)
    assert made.shape == (items, queries, 64)
    assert keys or torch.equal(made, torch.zeros_like(made))
