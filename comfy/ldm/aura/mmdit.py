"""AuraFlow: a picture and a text stream in the first layers, one stream of both in the rest.

Learned register tokens stand before the text. Custom nodes reach in through
``transformer_options``: ``patches_replace["dit"]`` with keys ``("double_block", i)`` (``img``,
``txt``, ``vec``) and ``("single_block", i)``, whose ``img`` is registers, text and patches in one;
``patches["attn1_output_patch"]`` sees every attention and finds the picture's tokens at
``extra_options["img_slice"]``.
Source: https://github.com/cloneofsimo/minRF; https://huggingface.co/fal/AuraFlow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

TIME_WAVES = 256
TIME_SCALE = 1000.0  # times 0..1 turn as those of 0..1000 do elsewhere
REGISTERS = 8
NORM_EPS = 1e-5
INNER_MULTIPLE = 256
Options = dict[str, Any]


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``x * (1 + scale) + shift`` with ``[B, D]`` for all tokens."""
    return torch.addcmul(shift[:, None], x, 1 + scale[:, None])


def feed_forward_width(dim: int) -> int:
    """Channels inside a feed-forward: 8/3 of the width, in whole blocks of 256."""
    return -(-int(8 * dim / 3) // INNER_MULTIPLE) * INNER_MULTIPLE


class MLP(nn.Module):
    """Feed-forward with a gate."""

    def __init__(self, dim: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.c_fc1 = operations.Linear(dim, inner, bias=False, **place)
        self.c_fc2 = operations.Linear(dim, inner, bias=False, **place)
        self.c_proj = operations.Linear(inner, dim, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(functional.silu(self.c_fc1(x)) * self.c_fc2(x))


class _Projections(nn.Module):
    """Projections of one or two streams; norms of queries and keys have no weights.

    Those of the first stream are called ``w1*``, those of the second ``w2*``.
    """

    streams: int

    def __init__(
        self,
        dim: int,
        n_heads: int,
        mh_qknorm: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        if mh_qknorm:
            raise ValueError("AuraFlow norms every head alike: there are no norms for each")
        self.n_heads = n_heads
        for stream in range(1, self.streams + 1):
            for name in "qkvo":
                layer = operations.Linear(dim, dim, bias=False, dtype=dtype, device=device)
                setattr(self, f"w{stream}{name}", layer)

    def before(self, x: Tensor, stream: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[B, L, heads, size]`` of a stream ``[B, L, D]``."""
        q, k, v = (
            getattr(self, f"w{stream}{name}")(x).unflatten(-1, (self.n_heads, -1)) for name in "qkv"
        )
        size = q.shape[-1:]
        q = functional.layer_norm(q, size, eps=NORM_EPS)
        return q, functional.layer_norm(k, size, eps=NORM_EPS), v

    def after(self, x: Tensor, stream: int = 1) -> Tensor:
        """The projection after the attention."""
        return getattr(self, f"w{stream}o")(x)


class SingleAttention(_Projections):
    """Attention of the tokens of one stream."""

    streams = 1

    def forward(
        self, c: Tensor, transformer_options: Options | None = None, length: int = 0
    ) -> Tensor:
        """Of ``c [B, L, D]``, of which the first ``length`` are no patches."""
        return self.after(attend(*self.before(c), length, transformer_options))


class DoubleAttention(_Projections):
    """Attention of the tokens of both streams among all."""

    streams = 2

    def forward(
        self, c: Tensor, x: Tensor, transformer_options: Options | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of text ``c`` and picture ``x [B, L, D]``."""
        parts = zip(self.before(c), self.before(x, 2))
        q, k, v = (torch.cat(pair, dim=1) for pair in parts)
        seen = attend(q, k, v, c.shape[1], transformer_options)
        of_text, of_picture = seen.split([c.shape[1], x.shape[1]], dim=1)
        return self.after(of_text), self.after(of_picture, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, length: int, options: Options | None) -> Tensor:
    """Attention ``[B, L, D]`` of all tokens; the first ``length`` are those of the text."""
    heads = q.shape[2]
    seen = attention.optimized_attention(
        q.flatten(2), k.flatten(2), v.flatten(2), heads, transformer_options=options
    )
    return patches.attention_output(seen, options, heads, (length, seen.shape[1]))


class MMDiTBlock(nn.Module):
    """A layer over text and picture, each with weights of its own."""

    compiles_alone = True

    def __init__(self, dim: int, heads: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        for stream in "CX":
            norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
            setattr(self, f"norm{stream}1", operations.LayerNorm(dim, **norm))
            setattr(self, f"norm{stream}2", operations.LayerNorm(dim, **norm))
            setattr(self, f"mlp{stream}", MLP(dim, inner, operations, **place))
            linear = operations.Linear(dim, 6 * dim, bias=False, **place)
            setattr(self, f"mod{stream}", nn.Sequential(nn.SiLU(), linear))
        self.attn = DoubleAttention(dim, heads, operations=operations, **place)

    def forward(
        self, c: Tensor, x: Tensor, vec: Tensor, transformer_options: Options | None = None
    ) -> tuple[Tensor, Tensor]:
        """Text ``c`` and picture ``x [B, L, D]`` at the time ``vec [B, D]``."""
        of_text, of_picture = (getattr(self, f"mod{s}")(vec).chunk(6, dim=1) for s in "CX")
        normed = [
            modulate(getattr(self, f"norm{stream}1")(tokens), *changes[:2])
            for stream, tokens, changes in (("C", c, of_text), ("X", x, of_picture))
        ]
        seen = self.attn(*normed, transformer_options=transformer_options)
        made = [
            self._think(*parts)
            for parts in (("C", c, seen[0], of_text), ("X", x, seen[1], of_picture))
        ]
        return made[0], made[1]

    def _think(
        self, stream: str, tokens: Tensor, seen: Tensor, changes: Sequence[Tensor]
    ) -> Tensor:
        """A stream's tokens after its feed-forward, through which alone the attention acts."""
        _, _, gate, shift, scale, gate_mlp = changes
        joined = tokens + gate[:, None] * seen
        normed = modulate(getattr(self, f"norm{stream}2")(joined), shift, scale)
        return tokens + gate_mlp[:, None] * getattr(self, f"mlp{stream}")(normed)


class DiTBlock(nn.Module):
    """A layer over text and picture in one stream."""

    compiles_alone = True

    def __init__(self, dim: int, heads: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.norm1 = operations.LayerNorm(dim, **norm)
        self.norm2 = operations.LayerNorm(dim, **norm)
        linear = operations.Linear(dim, 6 * dim, bias=False, **place)
        self.modCX = nn.Sequential(nn.SiLU(), linear)
        self.attn = SingleAttention(dim, heads, operations=operations, **place)
        self.mlp = MLP(dim, inner, operations, **place)

    def forward(
        self, cx: Tensor, vec: Tensor, length: int, transformer_options: Options | None = None
    ) -> Tensor:
        """All tokens ``cx [B, L, D]``, of which the first ``length`` are no patches."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modCX(vec).chunk(6, dim=1)
        normed = modulate(self.norm1(cx), shift, scale)
        joined = cx + gate[:, None] * self.attn(normed, transformer_options, length)
        normed = modulate(self.norm2(joined), shift_mlp, scale_mlp)
        return cx + gate_mlp[:, None] * self.mlp(normed)  # the attention acts only through this


class TimestepEmbedder(nn.Module):
    """Times 0..1 as vectors."""

    def __init__(self, dim: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            operations.Linear(TIME_WAVES, dim, **place),
            nn.SiLU(),
            operations.Linear(dim, dim, **place),
        )

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        return self.mlp(timestep_embedding(t * TIME_SCALE, TIME_WAVES).to(dtype))


class MMDiT(nn.Module):
    """Predicts the flow of a noisy latent from a time 0..1 and text tokens.

    Args:
        n_layers, n_double_layers: All layers; those of two streams among them.
        global_conddim: Width of the time's vector.
        cond_seq_dim: Width of the text tokens.
        max_seq: Positions of the learned table, a square number.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT})

    def __init__(
        self,
        in_channels: int = 4,
        out_channels: int = 4,
        patch_size: int = 2,
        dim: int = 3072,
        n_layers: int = 36,
        n_double_layers: int = 4,
        n_heads: int = 12,
        global_conddim: int | None = None,
        cond_seq_dim: int = 2048,
        max_seq: int = 32 * 32,
        inner_dim: int | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        if dim % n_heads:
            raise ValueError(f"{dim} channels, which {n_heads} heads do not divide")
        if global_conddim not in (None, dim):
            raise ValueError(f"a time of {global_conddim} channels beside tokens of {dim}")
        if math.isqrt(max_seq) ** 2 != max_seq:
            raise ValueError(f"{max_seq} positions, which is no square number")
        place = {"dtype": dtype, "device": device}
        sizes = (dim, n_heads, inner_dim or feed_forward_width(dim), operations)
        self.dtype, self.patch_size, self.out_channels = dtype, patch_size, out_channels
        self.t_embedder = TimestepEmbedder(dim, operations, **place)
        self.cond_seq_linear = operations.Linear(cond_seq_dim, dim, bias=False, **place)
        self.init_x_linear = operations.Linear(patch_size**2 * in_channels, dim, **place)
        self.positional_encoding = nn.Parameter(torch.empty(1, max_seq, dim, **place))
        self.register_tokens = nn.Parameter(torch.empty(1, REGISTERS, dim, **place))
        self.double_layers = nn.ModuleList(
            MMDiTBlock(*sizes, **place) for _ in range(n_double_layers)
        )
        self.single_layers = nn.ModuleList(
            DiTBlock(*sizes, **place) for _ in range(n_layers - n_double_layers)
        )
        linear = operations.Linear(dim, 2 * dim, bias=False, **place)
        self.modF = nn.Sequential(nn.SiLU(), linear)
        self.final_linear = operations.Linear(
            dim, patch_size**2 * out_channels, bias=False, **place
        )

    def positions(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Of ``rows`` times ``columns`` patches ``[1, L, D]``: from the middle of the square there
        is, which is stretched for a larger latent."""
        table: Tensor = self.positional_encoding.to(like)
        side = math.isqrt(table.shape[1])
        square = table.unflatten(1, (side, side))
        largest = max(rows, columns)
        if largest > side:
            square = functional.interpolate(
                square.movedim(-1, 1), (largest, largest), mode="bilinear"
            ).movedim(1, -1)
            side = largest
        top, left = (side - rows) // 2, (side - columns) // 2
        return square[:, top : top + rows, left : left + columns].flatten(1, 2)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, H, W]``.
            timestep: Times ``[B]`` in 0..1.
            context: Text tokens ``[B, L, D]``.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options, x, timestep, context, options, **kwargs
        )

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        transformer_options: Options | None = None,
        **_: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        height, width = x.shape[-2:]
        p = self.patch_size
        padded = pad_to_patch_size(x, (p, p))
        rows, columns = (size // p for size in padded.shape[-2:])
        cells = rearrange(padded, "b c (h p) (w q) -> b (h w) (c p q)", p=p, q=p)
        img = self.init_x_linear(cells)
        img = img + self.positions(rows, columns, img)
        txt = self.cond_seq_linear(context)
        registers = self.register_tokens.to(txt).expand(txt.shape[0], -1, -1)
        vec = self.t_embedder(timestep, x.dtype)
        img = self._run_layers(torch.cat([registers, txt], dim=1), img, vec, options)
        shift, scale = self.modF(vec).chunk(2, dim=1)
        out = self.final_linear(modulate(img, shift, scale))
        out = rearrange(out, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=p, q=p)
        return out[..., :height, :width]

    def _run_layers(self, txt: Tensor, img: Tensor, vec: Tensor, options: Options) -> Tensor:
        """The picture's tokens after all layers."""
        table = (options.get("patches_replace") or {}).get("dit") or {}
        length = txt.shape[1]
        shared = {"vec": vec, "transformer_options": options}
        options["total_blocks"], options["block_type"] = len(self.double_layers), "double"
        for number, layer in enumerate(self.double_layers):
            options["block_index"] = number

            def original(args: Mapping[str, Any], layer: nn.Module = layer) -> Options:
                told = args.get("transformer_options")
                c, x = layer(args["txt"], args["img"], args["vec"], transformer_options=told)
                return {"txt": c, "img": x}

            args = {"img": img, "txt": txt, **shared}
            out = replaced(table.get(("double_block", number)), args, original)
            txt, img = out["txt"], out["img"]
        joined = torch.cat([txt, img], dim=1)
        options["total_blocks"], options["block_type"] = len(self.single_layers), "single"
        for number, layer in enumerate(self.single_layers):
            options["block_index"] = number

            def one_stream(args: Mapping[str, Any], layer: nn.Module = layer) -> Options:
                told = args.get("transformer_options")
                return {"img": layer(args["img"], args["vec"], length, transformer_options=told)}

            args = {"img": joined, **shared}
            joined = replaced(table.get(("single_block", number)), args, one_stream)["img"]
        return joined[:, length:]


def replaced(
    replacement: Callable[..., Options] | None,
    args: Options,
    original: Callable[[Mapping[str, Any]], Options],
) -> Options:
    """One layer, or what a custom node put in its place."""
    if replacement is None:
        return original(args)
    return replacement(args, {"original_block": original})
