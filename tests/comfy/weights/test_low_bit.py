"""Blocks of few bits are decoded to the very bits that each format's own reference gives."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ops.encoded import EncodedWeight, Parts
from comfy.weights import encodings
from comfy.weights.assign import assign_weights
from comfy.weights.encodings import UnknownEncodingError
from comfy.weights.low_bit import blocks as low_bit
from comfy.weights.low_bit import four_bit
from comfy.weights.low_bit.blocks import BlockCode
from comfy.weights.low_bit.ggml import GGML_TYPES, GgmlType
from comfy.weights.low_bit.stored import StoredWeight
from tests.support import gguf_files

# SHA-256 (first half of it) of what the package gguf 0.19.0 (MIT) makes of `noise(name, ...)`.
GGML_DIGESTS = {
    "Q4_0": "42c8bfcbce2cef9e",
    "Q4_1": "3286a9ed8918835b",
    "Q5_0": "e66fb6ef4f1dd99b",
    "Q5_1": "fa773b266c7bdcaa",
    "Q8_0": "6ec7093c234622c8",
    "Q2_K": "ddc63ba1478ff6ea",
    "Q3_K": "b3e0a1db5c118c18",
    "Q4_K": "628278f5eacba847",
    "Q5_K": "f833d39f3e2ddfb9",
    "Q6_K": "d8e2748f421b7749",
    "IQ4_NL": "72aeeb7a282d17e2",
    "IQ4_XS": "a750552ca8cd75d5",
    "TQ1_0": "4c359fe2daa94de8",
    "TQ2_0": "de76aacf97bccdcd",
    "MXFP4": "61de56b9b11742fe",
}
# The same of comfy-kitchen 0.2.40 (Apache-2.0) and bitsandbytes 0.50.2 (MIT).
NVFP4_DIGEST, MXFP8_DIGEST = "c1ed0159ad12da38", "cecaf80a026dbf1b"
BNB_DIGESTS = {"plain": "1d88fc92b98b5fe7", "nested": "787a690634a79cf7"}
QUANTISED = [kind for kind in GGML_TYPES.values() if kind.unpack is not None]
ROWS, COLUMNS = 160, 192
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def noise(name: str, size: int) -> Tensor:
    """Bytes that are the same everywhere."""
    content = bytearray(hashlib.shake_256(name.encode()).digest(size))
    return torch.frombuffer(content, dtype=torch.uint8)


def digest(numbers: Tensor) -> str:
    whole = torch.nan_to_num(numbers, nan=0.0, posinf=1e30, neginf=-1e30).contiguous()
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_blocks_of_gguf_are_decoded_bit_for_bit(
    kind: GgmlType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_bit, "CPU_NUMBERS", 7 * kind.elements)  # several rounds, the last short
    stored = noise(kind.name, 40 * kind.size)
    assert kind.unpack is not None
    shape = torch.Size((40, kind.elements))
    code = BlockCode(kind.name, shape, kind.elements, kind.size, kind.unpack)
    assert digest(code.decode(stored, {}, torch.float32)) == GGML_DIGESTS[kind.name]


@pytest.mark.parametrize("name", gguf_files.ENCODERS)
def test_what_was_quantised_comes_back_but_for_rounding(name: str) -> None:
    kind = GGML_TYPES[gguf_files.NUMBERS[name]]
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    stored = torch.frombuffer(bytearray(gguf_files.encoded(weight, name)), dtype=torch.uint8)
    assert kind.unpack is not None
    code = BlockCode(name, weight.shape, kind.elements, kind.size, kind.unpack)
    lost = (code.decode(stored, {}, torch.float32) - weight).norm() / weight.norm()
    levels = 2 ** int(name.removeprefix("I")[1])
    assert lost < 2 / levels  # of numbers that lie a few times their spread apart at most
    rounded = code.decode(stored, {}, torch.bfloat16)
    assert torch.equal(rounded, code.decode(stored, {}, torch.float32).bfloat16())


def nvfp4_parts() -> tuple[Tensor, Parts]:
    scales = (noise("nvfp4 scales", 256 * 12) % 0x7F).view(torch.float8_e4m3fn)
    parts = {"weight_scale": scales.reshape(256, 12), "weight_scale_2": torch.tensor(0.01)}
    return noise("nvfp4", ROWS * COLUMNS // 2).reshape(ROWS, -1), parts


def mxfp8_parts() -> tuple[Tensor, Parts]:
    codes = noise("mxfp8", ROWS * COLUMNS)
    codes = torch.where((codes & 0x7F) == 0x7F, torch.zeros_like(codes), codes)
    scales = noise("mxfp8 scales", 256 * 8) % 140 + 60
    return codes.view(torch.float8_e4m3fn).reshape(ROWS, -1), {"weight_scale": scales}


def bnb_parts(nested: bool) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    count = ROWS * COLUMNS
    told: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32",
                            "shape": [ROWS, COLUMNS]}  # fmt: skip
    scales = noise("absmax", count // 64)
    parts = {"quant_map": torch.tensor(NF4), "absmax": scales.float() / 100}
    if nested:
        told.update(nested_blocksize=256, nested_dtype="float32", nested_offset=0.5)
        parts.update(
            absmax=scales,
            nested_absmax=torch.tensor([1.5, 0.25]),
            nested_quant_map=torch.linspace(-1, 1, 256),
        )
    state = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    return noise("nf4", count // 2).reshape(-1, 1), parts, state


def test_block_scaled_floats_are_decoded_bit_for_bit() -> None:
    stored, parts = nvfp4_parts()
    decoded = four_bit.nvfp4(stored, parts).decode(stored, parts, torch.float32)
    assert digest(decoded) == NVFP4_DIGEST
    stored, parts = mxfp8_parts()
    decoded = four_bit.mxfp8(stored, parts).decode(stored, parts, torch.float32)
    assert digest(decoded) == MXFP8_DIGEST


@pytest.mark.parametrize("form", ["plain", "nested"])
def test_weights_of_bitsandbytes_are_decoded_bit_for_bit(form: str) -> None:
    stored, parts, state = bnb_parts(form == "nested")
    code = four_bit.bitsandbytes("nf4", stored, parts, state)
    assert digest(code.decode(stored, parts, torch.float32)) == BNB_DIGESTS[form]


def test_the_table_of_eight_bit_floats_is_what_torch_makes_of_all_bytes() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    table = torch.tensor(four_bit.E4M3_VALUES)
    assert torch.equal(table.nan_to_num(1e9), every.float().nan_to_num(1e9))


def test_powers_of_two_are_exact_down_to_the_smallest() -> None:
    from comfy.weights.low_bit.bits import power_of_two

    exponents = torch.arange(255, dtype=torch.int32)
    exact = torch.tensor([2.0 ** (n - 127) for n in range(255)], dtype=torch.float64)
    assert torch.equal(power_of_two(exponents.to(torch.uint8), 127).double(), exact)
    assert torch.equal(power_of_two(exponents.to(torch.uint8), 128).double(), exact / 2)


# -- in layers -------------------------------------------------------------------------------------


def settings(name: str, **more: Any) -> Tensor:
    text = json.dumps({"format": name, **more}).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def layer_file(form: str) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors of a layer named 0, its weight decoded) in a form files have."""
    if form.startswith("nf4"):
        stored, own, state = bnb_parts(form == "nf4 nested")
        code = four_bit.bitsandbytes("nf4", stored, own, state)
        file = {f"0.weight.{name}": part for name, part in own.items()}
        file["0.weight.quant_state.bitsandbytes__nf4"] = state
        return {"0.weight": stored, **file}, code.decode(stored, own, torch.float32)
    if form == "float8":
        stored = torch.ones(ROWS, COLUMNS).to(torch.float8_e4m3fn)
        file = {"0.weight": stored, "0.weight_scale": torch.tensor(2.0)}
        return {**file, "0.comfy_quant": settings("float8_e4m3fn")}, stored.float() * 2
    if form.startswith("int8"):
        stored = noise("int8", ROWS * COLUMNS).view(torch.int8).reshape(ROWS, COLUMNS)
        scale = torch.rand(ROWS, 1) if form == "int8 of rows" else torch.tensor(0.02)
        file = {"0.weight": stored, "0.weight_scale": scale}
        return {**file, "0.comfy_quant": settings("int8_tensorwise")}, stored.float() * scale
    stored, parts = nvfp4_parts() if form == "nvfp4" else mxfp8_parts()
    code = (four_bit.nvfp4 if form == "nvfp4" else four_bit.mxfp8)(stored, parts)
    file = {"0.weight": stored, **{f"0.{name}": part for name, part in parts.items()}}
    return {**file, "0.comfy_quant": settings(form)}, code.decode(stored, parts, torch.float32)


BNB = "0.weight.quant_state.bitsandbytes__nf4"


def told_of_bnb(**changed: Any) -> dict[str, Tensor]:
    """What bitsandbytes says of a layer, some of it changed."""
    told = {**json.loads(bytes(bnb_parts(True)[2].tolist())), **changed}
    return {BNB: torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)}


FORMS = ("nvfp4", "mxfp8", "int8", "int8 of rows", "nf4 plain", "nf4 nested")


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_holds_its_weight_in_the_code_and_computes_with_the_numbers(form: str) -> None:
    file, decoded = layer_file(form)
    net = nn.Sequential(ops.disable_weight_init.Linear(COLUMNS, ROWS, bias=False, device="meta"))
    report = assign_weights(net, file)
    assert not report.missing
    assert not report.unexpected
    layer: Any = net[0]
    assert isinstance(layer, EncodedWeight)
    assert layer.weight.element_size() == 1
    assert layer.decoded_shape() == (ROWS, COLUMNS)
    x = torch.randn(2, COLUMNS)
    torch.testing.assert_close(net(x), x @ decoded.T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_in_another_type_keeps_its_code(form: str, dtype: torch.dtype) -> None:
    file, _ = layer_file(form)
    net = nn.Sequential(ops.disable_weight_init.Linear(COLUMNS, ROWS, device="meta"))
    assign_weights(net, {**file, "0.bias": torch.ones(ROWS)})
    layer: Any = net[0]
    x = torch.randn(2, COLUMNS)
    code, wanted = {n: layer.state_dict()[n].dtype for n in layer.state_dict()}, net(x)
    net.to(dtype)
    assert {n: layer.state_dict()[n].dtype for n in code} == {**code, "bias": dtype}
    assert torch.equal(net(x), wanted)


def test_compiled_code_decodes_a_weight_at_one_stroke(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, numbers = stored_weight(kind="Q4_0")
    asked: list[int] = []
    unpack = GGML_TYPES[gguf_files.NUMBERS["Q4_0"]].unpack
    assert isinstance(weight.code, BlockCode)
    assert unpack is not None

    def counted(blocks: Tensor) -> Tensor:
        asked.append(len(blocks))
        return unpack(blocks)

    code = dataclasses.replace(weight.code, unpack=counted)
    monkeypatch.setattr(low_bit, "CPU_NUMBERS", 7 * 32)
    assert torch.equal(code.decode(weight.stored, {}, torch.float32), numbers)
    assert asked == [7, 7, 7, 7, 7, 7, 6]
    asked.clear()
    monkeypatch.setattr(low_bit, "compiling", lambda: True)
    assert torch.equal(code.decode(weight.stored, {}, torch.float32), numbers)
    assert asked == [48]


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_layer_loads_again(form: str) -> None:
    from comfy.ops.encoded import state_dict_for_file

    file, decoded = layer_file(form)
    first, again = (
        nn.Sequential(ops.disable_weight_init.Linear(COLUMNS, ROWS, bias=False, device="meta"))
        for _ in range(2)
    )
    assign_weights(first, file)
    saved = state_dict_for_file(first)
    assert ("0.comfy_quant" in saved) == ("0.comfy_quant" in file)
    report = assign_weights(again, saved)
    assert not report.unexpected
    x = torch.randn(2, COLUMNS)
    largest = float(decoded.abs().max())
    torch.testing.assert_close(first(x), again(x), rtol=1e-3, atol=largest * 1e-2)


@pytest.mark.parametrize("left_out", ["weight_scale", "weight_scale_2"])
def test_a_missing_scale_is_an_error_that_names_layer_and_scale(left_out: str) -> None:
    file, _ = layer_file("nvfp4")
    del file[f"0.{left_out}"]
    with pytest.raises(UnknownEncodingError, match=r"'0' is stored as 'nvfp4' without its scale"):
        encodings.gathered(file)


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("nvfp4", {"0.weight_scale": torch.zeros(4)}, r"needs 3072 of 1 byte"),
        ("mxfp8", {"0.weight": torch.zeros(4, 4)}, r"matrix of bytes; found \(4, 4\) in float32"),
        ("int8", {"0.weight_scale": torch.zeros(7)}, r"7 numbers in weight_scale; .*1 or 160"),
        ("int8", {"0.comfy_quant": settings("int8_tensorwise", convrot=True)}, r"'convrot'"),
        ("int8", {"0.comfy_quant": torch.ones(3).bfloat16()}, r"'0.comfy_quant' is not JSON"),
        ("nvfp4", {"0.weight_scale_2": torch.ones(2)}, r"2 numbers in weight_scale_2; expected 1"),
        ("float8", {"0.weight_scale": torch.ones(7)}, r"7 numbers in weight_scale; .*1 or 160"),
        ("float8", {"0.weight": torch.ones(ROWS, COLUMNS).byte()}, r"e4m3fn'; found uint8"),
        ("nf4 plain", {"0.weight": torch.zeros(3, 1).byte()}, r"in 3 bytes; .* needs 15360"),
        ("nf4 plain", {"0.weight.quant_state.bitsandbytes__nf4": torch.ones(2).byte()}, r"broken"),
        ("nf4 nested", {"0.weight.nested_absmax": None}, r"without its scale \(nested_absmax\)"),
        ("nf4 plain", {"0.weight.absmax": torch.ones(7)}, r"7 numbers in absmax; expected 480"),
        ("nf4 plain", {"0.weight.quant_map": torch.ones(7)}, r"7 numbers in quant_map; .* 16"),
        ("nf4 nested", {"0.weight.nested_absmax": torch.ones(1)}, r"nested_absmax; expected 2"),
        ("nf4 nested", {"0.weight.nested_quant_map": torch.ones(7)}, r"quant_map; expected 256"),
        ("nf4 plain", told_of_bnb(shape=[-ROWS, -COLUMNS]), r"'nf4' in 15360 bytes; \(-160, -192"),
        ("nf4 plain", told_of_bnb(blocksize=3), r"in blocks of 3 "),
        ("nf4 nested", told_of_bnb(nested_blocksize="x"), r"broken description \(invalid literal"),
        ("nf4 nested", told_of_bnb(nested_blocksize=0), r"nested_absmax; expected 480"),
        (
            "nf4 plain",
            {BNB: torch.frombuffer(bytearray(b"[" * 99999), dtype=torch.uint8)},
            "broken",
        ),
    ],
)
def test_tensors_that_do_not_agree_are_an_error(form: str, change: Any, said: str) -> None:
    file, _ = layer_file(form)
    file = {key: value for key, value in {**file, **change}.items() if value is not None}
    with pytest.raises(UnknownEncodingError, match=said):
        encodings.gathered(file)


# -- on the way to layers --------------------------------------------------------------------------


def stored_weight(rows: int = 24, kind: str = "Q8_0") -> tuple[StoredWeight, Tensor]:
    """A quantised weight, and its numbers."""
    of = GGML_TYPES[gguf_files.NUMBERS[kind]]
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    data = torch.frombuffer(bytearray(gguf_files.encoded(weight, kind)), dtype=torch.uint8)
    assert of.unpack is not None
    code = BlockCode(kind, weight.shape, of.elements, of.size, of.unpack)
    made = StoredWeight(data, code, weight.shape)
    return made, made.decoded()


@pytest.mark.parametrize(
    "take",
    [
        lambda t: t[3:9],
        lambda t: t.chunk(3)[1],
        lambda t: torch.split(t, [4, 20])[1],
        lambda t: t[torch.tensor([5, 0, 23])],
        lambda t: torch.cat([t[12:], t[:12]]),
        lambda t: t.narrow(0, 2, 5).clone(),
    ],
)
def test_rows_are_taken_and_joined_without_decoding(take: Any) -> None:
    weight, numbers = stored_weight()
    taken = take(weight)
    assert isinstance(taken, StoredWeight)
    assert taken.shape == take(numbers).shape
    assert torch.equal(taken.decoded(), take(numbers))
    assert taken.stored.nbytes == taken.numel() // 32 * 34


@pytest.mark.parametrize(
    "compute",
    [lambda t: t.T, lambda t: t[:, 3:5], lambda t: t + 1, lambda t: t.reshape(2, -1),
     lambda t: torch.cat([t, torch.ones(1, 64)]), lambda t: t.half()],
)  # fmt: skip
def test_all_other_arithmetic_gets_the_numbers(compute: Any) -> None:
    weight, numbers = stored_weight()
    result = compute(weight)
    assert not isinstance(result, StoredWeight)
    assert torch.equal(result, compute(numbers))


@pytest.mark.parametrize(
    "change",
    [lambda t: t.mul_(2), lambda t: t.copy_(torch.ones(24, 64)), lambda t: t.zero_(),
     lambda t: torch.add(torch.ones(24, 64), 1, out=t)],
)  # fmt: skip
def test_a_change_in_place_is_refused_where_it_would_be_lost(change: Any) -> None:
    weight, numbers = stored_weight()
    with pytest.raises(TypeError, match=r"cannot change .*\(24, 64\), Q8_0.* in place"):
        change(weight)
    assert torch.equal(weight.decoded(), numbers)


def test_a_token_table_is_decoded_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, numbers = stored_weight(50)
    net = nn.Sequential(ops.disable_weight_init.Embedding(50, 64, device="meta"))
    assign_weights(net, {"0.weight": weight})
    asked: list[int] = []
    whole = BlockCode.decode

    def counted(self: BlockCode, *arguments: Any) -> Tensor:
        asked.append(self.shape[0])
        return whole(self, *arguments)

    monkeypatch.setattr(BlockCode, "decode", counted)
    ids = torch.tensor([[7, 49, 7]])
    assert torch.equal(net(ids), numbers[ids])
    assert asked == [3]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3)])
def test_a_look_up_may_have_any_shape(shape: tuple[int, ...]) -> None:
    net = ops.disable_weight_init.Embedding(50, 64, device="meta")
    assign_weights(net, {"weight": stored_weight(50)[0]})
    assert net(torch.zeros(shape, dtype=torch.long)).shape == (*shape, 64)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_that_is_set_is_what_the_layer_computes_with(form: str, in_place: bool) -> None:
    net = nn.Sequential(ops.disable_weight_init.Linear(COLUMNS, ROWS, bias=False, device="meta"))
    assign_weights(net, layer_file(form)[0])
    layer: Any = net[0]
    weight = torch.randn(ROWS, COLUMNS).half().float()
    layer.set_weight(weight, inplace_update=in_place)
    x = torch.randn(2, COLUMNS)
    torch.testing.assert_close(net(x), x @ weight.T)


def test_what_no_layer_can_hold_in_a_code_is_decoded() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(1, 24, 64, device="meta"))

    weight, numbers = stored_weight()
    net = Odd()
    assert not assign_weights(net, {"table": weight}).missing
    assert torch.equal(net.table[0], numbers)
