"""Token merging: self-attention asks for fewer tokens, similar ones averaged.

The paper merges keys and values too. By default each merged query still sees all of them, as in the
pictures people have: it saves less and loses less.
Source: Bolya and Hoffman 2023, https://arxiv.org/abs/2303.17604.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comfy.devices import formulas
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

STRIDE = 2  # one token of each STRIDE x STRIDE square receives the others
MAX_DOWNSAMPLE = 1  # only the network's largest token grids are merged


def receiving_tokens(rows: int, columns: int, device: torch.device) -> Tensor:
    """Mask [rows * columns] with one random token of every square set; cells over are not."""
    squares = (rows // STRIDE, columns // STRIDE)
    chosen = torch.randint(STRIDE**2, squares, device=device)
    grid = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    places = torch.nn.functional.one_hot(chosen, STRIDE**2).bool()
    places = places.reshape(*squares, STRIDE, STRIDE).transpose(1, 2)
    grid[: squares[0] * STRIDE, : squares[1] * STRIDE] = places.reshape(
        squares[0] * STRIDE, squares[1] * STRIDE
    )
    return grid.flatten()


@dataclass
class Merge:
    """Which tokens are averaged into which.

    Attributes:
        sources, targets: Indices [B, sources], [B, targets] of tokens that give and receive.
        kept: Places [B, kept] among the sources that stay as they are.
        merged: Places [B, merged] among the sources that are merged.
        into: Place [B, merged] among the targets each of those goes to.
    """

    sources: Tensor
    targets: Tensor
    kept: Tensor
    merged: Tensor
    into: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Tokens [B, L, D] -> [B, kept + targets, D]."""
        sources, targets = _pick(x, self.sources), _pick(x, self.targets)
        index = self.into.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        moved = _pick(sources, self.merged)
        targets = targets.scatter_reduce(1, index, moved, reduce="mean", include_self=True)
        return torch.cat([_pick(sources, self.kept), targets], dim=1)

    def undo(self, x: Tensor) -> Tensor:
        """Results [B, kept + targets, D] -> [B, L, D]; merged tokens share their target's."""
        kept, targets = x.split([self.kept.shape[1], self.targets.shape[1]], dim=1)
        length = self.sources.shape[1] + self.targets.shape[1]
        out = x.new_zeros(x.shape[0], length, x.shape[-1])
        _place(out, self.targets, targets)
        _place(out, self.sources.gather(1, self.kept), kept)
        _place(out, self.sources.gather(1, self.merged), _pick(targets, self.into))
        return out


def _pick(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _place(out: Tensor, index: Tensor, values: Tensor) -> None:
    out.scatter_(1, index.unsqueeze(-1).expand(-1, -1, out.shape[-1]), values)


def plan_merge(x: Tensor, rows: int, columns: int, ratio: float) -> Merge | None:
    """The merge of a share of the tokens x [B, L, D] into their most similar receiving token."""
    batch, length, _ = x.shape
    receives = receiving_tokens(rows, columns, x.device)
    targets = receives.nonzero()[:, 0].expand(batch, -1)
    sources = (~receives).nonzero()[:, 0].expand(batch, -1)
    count = min(sources.shape[1], int(length * ratio))
    if count <= 0 or not targets.shape[1]:
        return None
    metric = torch.nn.functional.normalize(x.float(), dim=-1)
    likeness = _pick(metric, sources) @ _pick(metric, targets).transpose(-1, -2)
    best, into = likeness.max(dim=-1)
    order = best.argsort(dim=-1, descending=True)
    merged, kept = order[:, :count], order[:, count:]
    return Merge(sources, targets, kept, merged, into.gather(1, merged))


class Merging:
    """Merges the queries of a self-attention and gives the result back to all of them."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._merge: Merge | None = None

    def merge(
        self, q: Tensor, k: Tensor, v: Tensor, extra_options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of an attention with fewer queries; by the paper fewer keys and values, too."""
        height, width = extra_options["original_shape"][-2:]
        shrink = math.ceil(math.sqrt(height * width // q.shape[1]))
        self._merge = None
        if shrink <= MAX_DOWNSAMPLE:
            rows, columns = math.ceil(height / shrink), math.ceil(width / shrink)
            self._merge = plan_merge(q, rows, columns, self.ratio)
        plan = self._merge
        if plan is None:
            return q, k, v
        if formulas.as_published():
            k, v = plan.apply(k), plan.apply(v)
        return plan.apply(q), k, v

    def spread(self, out: Tensor, extra_options: Any) -> Tensor:
        """The result for every token."""
        del extra_options
        plan, self._merge = self._merge, None
        return out if plan is None else plan.undo(out)


class TomePatchModel(io.ComfyNode):
    """Makes large pictures faster by merging similar tokens."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TomePatchModel",
            category="model_patches/unet",
            inputs=[
                io.Model.Input("model"),
                io.Float.Input("ratio", default=0.3, min=0.0, max=1.0, step=0.01),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, ratio: float) -> io.NodeOutput:
        merging = Merging(ratio)
        view = model.clone()
        view.set_model_attn1_patch(merging.merge)
        view.set_model_attn1_output_patch(merging.spread)
        return io.NodeOutput(view)

    patch = execute


comfy_entrypoint = entrypoint_of(TomePatchModel)
