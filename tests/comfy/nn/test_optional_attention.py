"""Attention kernels of packages, stood in for by functions with the real ones' habits.

The habits were seen in SageAttention 1.0.6, FlashAttention 2.8.3 and xFormers 0.0.35, whose Triton
kernels were run interpreted (`benchmarks/interpreted.py`): what they refuse and by which error,
what they change, what they get wrong.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from comfy import cli_args
from comfy.nn import attention
from comfy.nn.attention import kernels, optional
from comfy.sampling.environment import environment
from utils import policies

PACKAGES = {
    "flash": ("flash_attn", "flash_attn_func"),
    "sage": ("sageattention", "sageattn"),
    "xformers": ("xformers.ops", "memory_efficient_attention"),
}


def sage_1(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **_):
    """Few head sizes, keys smoothed in place, keys that pad the last block of 64 counted."""
    assert q.shape[-1] in (64, 96, 128), "headdim should be in [64, 96, 128]."
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Last dim must be contiguous."
    assert tensor_layout == "HND"
    assert not is_causal
    q, k, v = (x.detach() for x in (q, k, v))  # what the kernels make has no history
    if smooth_k:
        k -= k.mean(dim=2, keepdim=True)
    padding = (0, 0, 0, -k.shape[2] % 64)
    if (64 * v.float().abs().max()).half().isinf():  # a block's values are added in float16
        v = v * torch.inf
    return F.scaled_dot_product_attention(q, F.pad(k, padding), F.pad(v, padding), scale=sm_scale)


def sage_2(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **_):
    assert (tensor_layout, is_causal, return_lse) == ("HND", False, False)
    return F.scaled_dot_product_attention(q, k, v, scale=sm_scale)


def flash_2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def flash_3(q, k, v, softmax_scale=None, causal=False, qv=None):
    return flash_2(q, k, v), torch.zeros(1)


def xformers_0(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    """Dense channels, and masks of the full shape that begin their rows at multiples of 8."""
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    if any(x.stride(-1) > 1 for x in rows):
        raise NotImplementedError("query.stride(-1) > 1")
    if attn_bias is not None:
        if attn_bias.shape != (*rows[0].shape[:3], key.shape[1]):
            raise ValueError(f"Invalid shape for attention bias: {attn_bias.shape}")
        if any(stride % 8 for stride in attn_bias.stride()[:-1]) or attn_bias.stride(-1) > 1:
            raise NotImplementedError("attn_bias.stride(-2) % 8 != 0")
    return F.scaled_dot_product_attention(*rows, attn_mask=attn_bias).transpose(1, 2)


CACHES = (
    optional._counts_padding, optional._told, optional._note, optional._imported, optional.versions,
)  # fmt: skip


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a function in the place of a package's, and tensors on an accelerator."""

    there = set()

    def put(module: str, function: str, made: Any) -> None:
        fake = ModuleType(module)
        setattr(fake, function, made)
        optional._imported.cache_clear()
        for name in (module, module.split(".")[0]):
            monkeypatch.setitem(sys.modules, name, fake)
            there.add(name)

    monkeypatch.setattr(optional, "is_installed", there.__contains__)
    monkeypatch.setattr(optional, "_is_on_accelerator", lambda q: True)
    for cache in CACHES:
        cache.cache_clear()
    yield put
    for cache in CACHES:
        cache.cache_clear()


def inputs(dim: int = 64, keys: int = 128, dtype: torch.dtype = torch.float16) -> Any:
    torch.manual_seed(0)
    return (torch.randn(2, 3, size, dim).to(dtype) for size in (70, keys, keys))


def close(made: torch.Tensor, *inputs: Any) -> None:
    torch.testing.assert_close(made, kernels.fused(*inputs), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("version", [sage_1, sage_2])
@pytest.mark.parametrize("keys", [64, 77, 192])
@pytest.mark.parametrize("dim", [40, 64, 80, 96, 100, 128, 160])
def test_sage_is_called_so_that_every_version_is_right(install, version, keys, dim) -> None:
    install("sageattention", "sageattn", version)
    q, k, v = inputs(dim, keys)
    before = k.clone()
    close(optional.sage(q, k, v), q, before, v)
    assert torch.equal(k, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 511, 513, 60000, 1e6])
def test_large_values_stay_finite_in_sage(install, dtype, size) -> None:
    install("sageattention", "sageattn", sage_1)
    q, k, v = inputs(dtype=dtype)
    v = (v / v.abs().max()).float() * torch.tensor([size, 1.0, 1e-3]).view(1, 3, 1, 1)
    if size > torch.finfo(dtype).max:
        return
    made, wanted = optional.sage(q, k, v.to(dtype)), kernels.fused(q, k, v.to(dtype))
    off = (made - wanted).float().norm(dim=(2, 3)) / wanted.float().norm(dim=(2, 3))
    assert float(off.max()) < 2 * torch.finfo(dtype).eps


def test_sage_takes_keys_whose_channels_lie_apart(install) -> None:
    install("sageattention", "sageattn", sage_1)
    q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs())
    made = []
    install("sageattention", "sageattn", lambda *a, **o: made.append(1) or sage_1(*a, **o))
    close(optional.sage(q, k, v), q, k, v)
    assert made


def test_sage_computes_itself_what_it_can(install, caplog) -> None:
    calls = []
    install("sageattention", "sageattn", lambda q, *a, **o: calls.append(q) or sage_1(q, *a, **o))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            optional.sage(*inputs(40, 128))
            optional.sage(*inputs(40, 77))
    assert [call.shape[2:] for call in calls] == [(70, 64), (32, 64), (70, 64)]  # one is the trial
    assert caplog.text.count("counts of keys that 64 does not divide") == 1


def test_exact_attention_may_be_asked_for(install) -> None:
    install("sageattention", "sageattn", lambda *_, **__: pytest.fail("approximate"))
    q, k, v = inputs()
    made = attention.attention_sage(
        q, k, v, 3, skip_reshape=True, skip_output_reshape=True, low_precision_attention=False
    )
    close(made, q, k, v)


@pytest.mark.parametrize(
    ("module", "version"), [("flash_attn", flash_2), ("flash_attn_interface", flash_3)]
)
def test_flash_attention_2_and_3_are_called_as_they_ask(install, module, version) -> None:
    install(module, "flash_attn_func", version)
    q, k, v = inputs(40, 77)
    close(optional.flash(q, k, v), q, k, v)
    assert next(row for row in attention.BACKENDS if row.name == "flash").is_available()


def test_a_folder_that_holds_no_package_is_none(tmp_path, monkeypatch) -> None:
    (tmp_path / "flash_attn_folder" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("flash_attn_folder") is not None
    assert not optional.is_installed("flash_attn_folder")


@pytest.mark.parametrize("kernel", ["flash", "sage"])
@pytest.mark.parametrize("limit", ["mask", "dtype", "head", "values", "keys"])
def test_what_is_beyond_a_package_is_done_by_torch_and_noted(install, kernel, limit, caplog):
    install(*PACKAGES[kernel], lambda *_, **__: pytest.fail("beyond the package"))
    dtype = torch.float32 if limit == "dtype" else torch.float16
    q, k, v = inputs(264 if limit == "head" else 64, dtype=dtype)
    mask = torch.ones(1, 1, 70, 128, dtype=torch.bool) if limit == "mask" else None
    v = v[..., :32] if limit == "values" else v
    k, v = (k[:, :, :0], v[:, :, :0]) if limit == "keys" else (k, v)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            close(getattr(optional, kernel)(q, k, v, mask), q, k, v, mask)
    assert caplog.text.count("torch's attention does these") == 1


@pytest.mark.parametrize("kernel", list(PACKAGES))
def test_torch_stands_in_for_a_package_on_the_cpu(kernel, caplog) -> None:
    q, k, v = inputs()
    optional._note.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            made = getattr(optional, kernel)(q, k, v)  # no package is there to be imported
    torch.testing.assert_close(made, kernels.fused(q, k, v))
    assert caplog.text.count(f"{kernel} does not take tensors on the CPU") == 1


def test_sage_trains_nothing_so_torch_does(install, caplog) -> None:
    install("sageattention", "sageattn", sage_1)
    q, k, v = (x.requires_grad_() for x in inputs())
    with caplog.at_level(logging.INFO):
        optional.sage(q, k, v).sum().backward()
    assert v.grad is not None
    assert "sage does not take gradients" in caplog.text


@pytest.mark.parametrize("keys", [8, 77])
@pytest.mark.parametrize("shape", [(2, 3, 70), (2, 1, 70), (1, 1, 70), (2, 1, 1), (1, 3, 1)])
@pytest.mark.parametrize("boolean", [True, False])
def test_masks_of_every_shape_reach_xformers(install, caplog, keys, shape, boolean) -> None:
    install("xformers.ops", "memory_efficient_attention", xformers_0)
    q, k, v = inputs(keys=keys)
    mask = torch.randn(*shape, keys)
    mask[..., 0] = 1  # a row that attends to nothing has no right result
    mask = mask > 0 if boolean else mask
    close(optional.xformers(q, k, v, mask), q, k, v, mask)
    assert not caplog.records


def test_xformers_takes_queries_whose_channels_lie_apart(install, caplog) -> None:
    install("xformers.ops", "memory_efficient_attention", xformers_0)
    q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs())
    close(optional.xformers(q, k, v), q, k, v)
    assert not caplog.records


def test_a_mask_that_heads_share_is_not_copied_for_each() -> None:
    q = torch.zeros(2, 24, 64, 8)
    bias = optional.aligned_bias(torch.zeros(1, 1, 64, 77), q, 77)
    assert bias.untyped_storage().nbytes() == 64 * 80 * q.element_size()


@pytest.mark.parametrize("kernel", list(PACKAGES))
@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, ValueError, NotImplementedError])
def test_a_package_that_fails_is_said_once_and_replaced(install, kernel, kind, caplog) -> None:
    def fails(*args, **kwargs):
        raise kind("this accelerator is too old")

    install(*PACKAGES[kernel], fails)
    q, k, v = inputs(keys=77)
    for _ in range(2):
        close(getattr(optional, kernel)(q, k, v), q, k, v)
    assert caplog.text.count("this accelerator is too old") == 1


@pytest.mark.parametrize("kernel", list(PACKAGES))
def test_a_failure_is_one_line_for_all_shapes(install, kernel, caplog) -> None:
    def fails(q, *args, **kwargs):
        raise NotImplementedError(f"No operator for\n  query : {tuple(q.shape)}\n  too old")

    install(*PACKAGES[kernel], fails)
    for keys in (64, 128, 192):
        q, k, v = inputs(keys, 128)
        getattr(optional, kernel)(q, k, v)
    assert len([record for record in caplog.records if "too old" in record.message]) == 1
    assert "\n" not in caplog.records[0].message


@pytest.mark.parametrize("kernel", list(PACKAGES))
def test_a_package_that_cannot_be_imported_is_refused_at_the_start(
    install, kernel, monkeypatch
) -> None:
    install(*PACKAGES[kernel], None)
    for name in (PACKAGES[kernel][0], PACKAGES[kernel][0].split(".")[0]):
        monkeypatch.setitem(sys.modules, name, None)  # as Python has it: importing raises
    with pytest.raises(ValueError, match=rf"'{kernel}'.*installed but cannot be imported.*halted"):
        attention.choose(attention.AttentionPolicy(kernel))


@pytest.mark.parametrize("kernel", list(PACKAGES))
def test_a_broken_package_is_imported_once(install, kernel, monkeypatch, caplog) -> None:
    tries = []

    def broken():
        tries.append(1)
        raise OSError("undefined symbol")

    monkeypatch.setattr(optional, f"{kernel}_function", broken)
    q, k, v = inputs()
    for _ in range(2):
        close(getattr(optional, kernel)(q, k, v), q, k, v)
    assert tries == [1]
    assert caplog.text.count("cannot be imported (OSError: undefined symbol)") == 1


def test_the_version_of_a_package_is_told_with_it(install, monkeypatch, caplog) -> None:
    install("sageattention", "sageattn", None)
    metadata = optional.importlib.metadata
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"sageattention": ["einops"]})
    version = metadata.version("einops")
    monkeypatch.setattr(attention, "_choice", attention._Choice())
    table = dict(attention.REGISTERED_ATTENTION_FUNCTIONS)
    monkeypatch.setattr(attention, "REGISTERED_ATTENTION_FUNCTIONS", table)
    with caplog.at_level(logging.INFO):
        attention.configure(attention.AttentionPolicy("sage"))
    assert f"Attention: sage (sageattention {version})" in caplog.text
    told = environment()
    assert (told["attention"], told["sageattention"]) == ("sage", version)


@pytest.mark.parametrize("kernel", list(PACKAGES))
def test_a_lack_of_memory_in_a_package_is_passed_on(install, kernel) -> None:
    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    install(*PACKAGES[kernel], fails)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(optional, kernel)(*inputs())


@pytest.mark.parametrize("kernel", list(PACKAGES))
def test_functions_of_installed_packages_are_found_by_name(install, kernel, monkeypatch) -> None:
    table = dict(attention.REGISTERED_ATTENTION_FUNCTIONS)
    monkeypatch.setattr(attention, "REGISTERED_ATTENTION_FUNCTIONS", table)
    assert attention.get_attention_function(kernel, None) is None
    install(*PACKAGES[kernel], None)
    own = getattr(attention, f"attention_{kernel}")
    assert attention.get_attention_function(kernel) is own
    assert table[kernel] is own


@pytest.mark.parametrize("kernel", list(PACKAGES))
def test_a_package_is_asked_for_at_the_start_and_must_be_there(install, kernel) -> None:
    args = cli_args.build_parser().parse_args([f"--use-{kernel}-attention"])
    policy = attention.AttentionPolicy(policies.precision_policy(args).attention)
    with pytest.raises(ValueError, match=rf"'{kernel}'.*not installed"):
        attention.choose(policy)
    install(*PACKAGES[kernel], None)
    assert attention.choose(policy).name == kernel


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [77, 256])
@pytest.mark.parametrize("kernel", list(PACKAGES))
def test_real_packages_agree_with_torch(kernel, keys) -> None:
    pytest.importorskip(PACKAGES[kernel][0].split(".")[0])
    q, k, v = (x.cuda() for x in inputs(64, keys))
    made = getattr(optional, kernel)(q, k, v)
    assert (made - kernels.fused(q, k, v)).norm() < 0.03 * made.norm()


@pytest.mark.parametrize("keys", [1, 7, 8, 77])
@pytest.mark.parametrize("boolean", [True, False])
def test_masks_for_xformers_are_additive_and_aligned(keys: int, boolean: bool) -> None:
    q = torch.zeros(2, 3, 5, 8)
    mask = torch.rand(2, 1, 1, keys) > 0.5 if boolean else torch.randn(2, 1, 5, keys)
    bias = optional.aligned_bias(mask, q, keys)
    assert bias.shape == (2, 3, 5, keys)
    assert bias.stride(2) % 8 == 0
    if boolean:
        assert torch.equal(bias == 0, mask.expand_as(bias))
    else:
        assert torch.equal(bias, mask.expand_as(bias))
