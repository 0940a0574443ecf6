"""Random histories of models whose weights were converted from a file, on the CPU and elsewhere.

The steps are those of `test_random_histories`; which device a view is loaded on is drawn as well.
On the CPU patched weights lie in the memory of their originals, which the file gives again: at the
end every parameter is the same object with the bytes of the file.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comfy.devices import residency
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.patcher import ModelPatcher
from comfy.weights import pages, row_blocks
from tests.comfy.patching.test_random_histories import (
    DEPTH,
    STEPS,
    WIDTH,
    BrokenAdapter,
    Failure,
    History,
    View,
)
from tests.support.accelerator import CPU, Network
from tests.support.from_file import network_from_file


class Rows:
    """Adding products to rows, which raises after a number of calls when told so."""

    def __init__(self) -> None:
        self.add, self.left = row_blocks._add, -1

    def __call__(self, *args: Any) -> None:
        self.add(*args)
        self.left -= 1
        if self.left == 0:
            raise Failure


class FileHistory(History):
    """A history of a network from a file."""

    def __init__(
        self, fakegpu: Any, used: torch.dtype, kind: type[ModelPatcher], folder: Path, rows: Rows
    ) -> None:
        self.folder, self.rows, self.holders = folder, rows, []
        self.stored = torch.bfloat16 if used == torch.float32 else torch.float32
        super().__init__(fakegpu, used, kind)
        self.there = self.device

    def fresh(self, seed: int = 0) -> Network:
        return network_from_file(self.folder, self.stored, self.dtype, WIDTH, DEPTH, seed)

    def choose(self, number: int) -> None:
        self.device = (CPU, self.there, CPU)[number % 3]

    def check(self) -> None:
        self.rows.left = -1
        super().check()

    def expected(self, view: View) -> torch.Tensor:
        wanted = super().expected(view)
        self.rows.left = -1
        return wanted

    def load(self, number: int, fraction: float) -> None:
        self.choose(number)
        for view in self.views:
            view.patcher.load_device = self.device
        super().load(number, fraction)

    def plan(self, number: int, fraction: float) -> None:
        self.choose(number)
        for view in self.views:
            view.patcher.load_device = self.device
        super().plan(number, fraction)

    def force(self, number: int, fraction: float) -> None:
        self.choose(number)
        super().force(number, fraction)

    def load_sibling(self, number: int, fraction: float) -> None:
        loaded, self.device = self.device, (CPU, self.there)[number % 2]
        try:
            super().load_sibling(number, fraction)
        finally:
            self.device = loaded

    def break_rows(self, number: int, fraction: float) -> None:
        """A failure in the middle of a weight that is patched in its own memory."""
        self.rows.left = 1 + int(fraction * 8)
        self.force(number - number % 3, fraction)

    def hold(self, number: int, _: float) -> None:
        """Somebody takes some weights, as they are shown."""
        shown = list(self.model.state_dict().values())
        self.holders = [(t, t.clone()) for t in shown[number::3] if t.device == CPU]

    def let_go(self, _: int, __: float) -> None:
        assert all(torch.equal(tensor, values) for tensor, values in self.holders)
        self.holders = []

    def look(self, number: int, _: float) -> None:
        """The originals are asked for while patched weights are shown."""
        view = self.view(number).patcher
        for key, ((weight, _convert), *_rest) in view.get_key_patches().items():
            if key != "scale":  # views may show another parameter as an object
                assert torch.equal(weight.cpu(), self.before[key][1]), key

    def finish(self) -> None:
        self.let_go(0, 0)
        super().finish()
        assert all(not view.patcher.residence.lent for view in self.views)


@pytest.mark.parametrize(
    ("kind", "used", "large"),
    [(ModelPatcher, torch.float32, 1), (ModelPatcher, torch.bfloat16, pages.LARGE),
     (ModelPatcherDynamic, torch.float32, pages.LARGE), (ModelPatcherDynamic, torch.bfloat16, 1)],
)  # fmt: skip
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from((*STEPS, "load", "break_rows", "break_rows", "hold", "let_go", "look")),
            st.integers(0, 7),
            st.floats(0, 1),
        ),
        min_size=3,
        max_size=14,
    )
)
def test_no_history_of_a_file_leaves_a_trace(
    accelerator: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[ModelPatcher],
    used: torch.dtype,
    large: int,
    steps: list[tuple[str, int, float]],
) -> None:
    monkeypatch.undo()
    rows = Rows()
    monkeypatch.setattr(row_blocks, "_add", rows)
    monkeypatch.setattr(pages, "LARGE", large)  # weights with pages of their own are watched
    monkeypatch.setattr(row_blocks, "BLOCK_ELEMENTS", 128)
    monkeypatch.setattr(row_blocks, "LoRAAdapter", BrokenAdapter)  # a plain one unless it is armed
    gc.collect()
    accelerator.reset()
    accelerator.set_rounding(1)
    accelerator.set_poison(True)
    residency.current_loaded_models.clear()
    history = FileHistory(accelerator, used, kind, tmp_path, rows)
    for name, number, fraction in steps:
        history.step(name, number, fraction)
    history.finish()
