"""HiDream: picture and text streams, then one of both; feed-forwards choose among experts.

Each layer sees the states of another layer of Llama, beside T5's. Custom nodes reach in through
``transformer_options``: ``patches["attn1_output_patch"]`` sees every attention and finds the
picture's tokens at ``extra_options["img_slice"]``; ``patches_replace["dit"]`` has keys
``("double_block", i)`` (``img``, ``txt``, ``vec``, ``pe``) and ``("single_block", i)``, whose
``img`` is all tokens in one.
Source: https://arxiv.org/abs/2505.22705; https://github.com/HiDream-ai/HiDream-I1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size, rms_norm
from comfy.ldm.flux.layers import EmbedND
from comfy.ldm.flux.math import apply_rope
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

TIME_WAVES = 256
THETA = 10000
NORM_EPS, HEAD_EPS = 1e-6, 1e-5
FEED_FORWARD = 4  # times the width
INNER_MULTIPLE = 256
Options = dict[str, Any]


def inner_width(hidden: int) -> int:
    """Channels inside a feed-forward with a gate, in whole blocks of 256."""
    return -(-int(2 * hidden / 3) // INNER_MULTIPLE) * INNER_MULTIPLE


class RMSNorm(nn.Module):
    """Division by the root mean square, times a weight."""

    def __init__(self, width: int, **place: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, **place))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x), HEAD_EPS)


class FeedForwardSwiGLU(nn.Module):
    """Feed-forward with a gate."""

    def __init__(self, width: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.w1 = operations.Linear(width, inner, bias=False, **place)
        self.w2 = operations.Linear(inner, width, bias=False, **place)
        self.w3 = operations.Linear(width, inner, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class MoEGate(nn.Module):
    """Which experts a token goes to, and how much each counts."""

    def __init__(self, width: int, experts: int, chosen: int, **place: Any) -> None:
        super().__init__()
        self.chosen = chosen
        self.weight = nn.Parameter(torch.empty(experts, width, **place))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts ``[N, chosen]`` of tokens ``[N, D]``."""
        scores = functional.linear(x, self.weight.to(x)).softmax(dim=-1)
        weights, numbers = scores.topk(self.chosen, dim=-1, sorted=False)
        return weights, numbers


class MOEFeedForwardSwiGLU(nn.Module):
    """Experts of which each token takes some, and one that all take."""

    def __init__(
        self,
        width: int,
        inner: int,
        shared: int,
        experts: int,
        chosen: int,
        operations: Any,
        **place: Any,
    ) -> None:
        super().__init__()
        self.shared_experts = FeedForwardSwiGLU(width, shared, operations, **place)
        self.experts = nn.ModuleList(
            FeedForwardSwiGLU(width, inner, operations, **place) for _ in range(experts)
        )
        self.gate = MoEGate(width, experts, chosen, **place)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, numbers = self.gate(tokens)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (numbers == number).nonzero(as_tuple=True)
            if rows.numel():
                share = weights[rows, places, None]
                made.index_add_(0, rows, expert(tokens[rows]) * share.to(tokens))
        return made.view_as(x) + self.shared_experts(x)


class Attention(nn.Module):
    """Attention of one or two streams; weights of the text's end in ``_t``."""

    to_out: nn.Module
    to_out_t: nn.Module

    def __init__(
        self, width: int, heads: int, has_text: bool, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.heads, self.has_text = heads, has_text
        for ending in ("", "_t") if has_text else ("",):
            for name in ("to_q", "to_k", "to_v", "to_out"):
                setattr(self, name + ending, operations.Linear(width, width, **place))
            for name in ("q_rms_norm", "k_rms_norm"):
                setattr(self, name + ending, RMSNorm(width, **place))

    def _projected(self, x: Tensor, ending: str) -> tuple[Tensor, ...]:
        def part(name: str) -> Tensor:
            out: Tensor = getattr(self, name + ending)(x)
            return out

        q = getattr(self, f"q_rms_norm{ending}")(part("to_q"))
        k = getattr(self, f"k_rms_norm{ending}")(part("to_k"))
        return tuple(t.unflatten(-1, (self.heads, -1)) for t in (q, k, part("to_v")))

    def forward(
        self,
        img: Tensor,
        txt: Tensor | None,
        freqs: Tensor,
        options: Options,
        picture: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """``img [B, L, D]`` and ``txt [B, M, D]`` at rotations ``freqs``.

        Args:
            picture: Start and stop of the picture's tokens.
        """
        parts = [self._projected(img, "")]
        if txt is not None:
            parts.append(self._projected(txt, "_t"))
        q, k, v = (torch.cat(some, dim=1).transpose(1, 2) for some in zip(*parts))
        q, k = apply_rope(q, k, freqs)
        seen = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, transformer_options=options
        )
        seen = patches.attention_output(seen, options, self.heads, picture)
        if txt is None:
            return self.to_out(seen), None
        of_picture, of_text = seen.split([img.shape[1], txt.shape[1]], dim=1)
        return self.to_out(of_picture), self.to_out_t(of_text)


class Sizes:
    """Sizes that all layers share."""

    def __init__(
        self, width: int, heads: int, experts: int, chosen: int, inner: int, shared: int
    ) -> None:
        self.width, self.heads, self.experts, self.chosen = width, heads, experts, chosen
        self.inner, self.shared = inner, shared


class _Block(nn.Module):
    compiles_alone = True

    def __init__(self, sizes: Sizes, has_text: bool, operations: Any, **place: Any) -> None:
        super().__init__()
        width, norm = sizes.width, {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.changes = 12 if has_text else 6
        linear = operations.Linear(width, self.changes * width, **place)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), linear)
        self.norm1_i, self.norm3_i = (operations.LayerNorm(width, **norm) for _ in range(2))
        self.attn1 = Attention(width, sizes.heads, has_text, operations, **place)
        self.ff_i = MOEFeedForwardSwiGLU(
            width, sizes.inner, sizes.shared, sizes.experts, sizes.chosen, operations, **place
        )
        if has_text:
            self.norm1_t, self.norm3_t = (operations.LayerNorm(width, **norm) for _ in range(2))
            self.ff_t = FeedForwardSwiGLU(width, sizes.inner, operations, **place)


class SingleBlock(_Block):
    """A layer over all tokens in one stream."""

    def __init__(self, sizes: Sizes, operations: Any, **place: Any) -> None:
        super().__init__(sizes, False, operations, **place)

    def forward(
        self, x: Tensor, vec: Tensor, freqs: Tensor, options: Options, picture: Sequence[int]
    ) -> Tensor:
        changes = self.adaLN_modulation(vec)[:, None].chunk(self.changes, dim=-1)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = changes
        normed = self.norm1_i(x) * (1 + scale) + shift
        x = x + gate * self.attn1(normed, None, freqs, options, picture)[0]
        return x + gate_mlp * self.ff_i(self.norm3_i(x) * (1 + scale_mlp) + shift_mlp)


class DoubleBlock(_Block):
    """A layer over picture and text, each with weights of its own."""

    def __init__(self, sizes: Sizes, operations: Any, **place: Any) -> None:
        super().__init__(sizes, True, operations, **place)

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        vec: Tensor,
        freqs: Tensor,
        options: Options,
        picture: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        changes = self.adaLN_modulation(vec)[:, None].chunk(self.changes, dim=-1)
        of_picture, of_text = changes[:6], changes[6:]
        normed = self.norm1_i(img) * (1 + of_picture[1]) + of_picture[0]
        normed_text = self.norm1_t(txt) * (1 + of_text[1]) + of_text[0]
        seen, seen_text = self.attn1(normed, normed_text, freqs, options, picture)
        img, txt = img + of_picture[2] * seen, txt + of_text[2] * seen_text
        normed = self.norm3_i(img) * (1 + of_picture[4]) + of_picture[3]
        normed_text = self.norm3_t(txt) * (1 + of_text[4]) + of_text[3]
        img = img + of_picture[5] * self.ff_i(normed)
        return img, txt + of_text[5] * self.ff_t(normed_text)


class Held(nn.Module):
    """A layer under the published key ``block``."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return self.block(*args)


class TwoLinear(nn.Module):
    """Two linear layers with SiLU between them."""

    def __init__(self, width: int, out: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.linear_1 = operations.Linear(width, out, **place)
        self.linear_2 = operations.Linear(out, out, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(functional.silu(self.linear_1(x)))


class _Embedder(nn.Module):
    """Two linear layers under a published key."""

    def __init__(self, key: str, width: int, out: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.key = key
        setattr(self, key, TwoLinear(width, out, operations, **place))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.key)(x)


class Projection(nn.Module):
    """A linear layer under a published key."""

    def __init__(
        self, key: str, width: int, out: int, bias: bool, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.key = key
        setattr(self, key, operations.Linear(width, out, bias=bias, **place))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.key)(x)


class OutEmbed(nn.Module):
    """A modulated norm and a projection to patches."""

    def __init__(self, width: int, out: int, operations: Any, **place: Any) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.norm_final = operations.LayerNorm(width, **norm)
        self.linear = operations.Linear(width, out, **place)
        linear = operations.Linear(width, 2 * width, **place)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), linear)

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class HiDreamImageTransformer2DModel(nn.Module):
    """Predicts the flow of a noisy latent from a time 0..1000, pooled text and states of two
    encoders.

    Args:
        caption_channels: Widths of T5's and of Llama's states.
        text_emb_dim: Width of the pooled text.
        num_routed_experts, num_activated_experts: Experts of a feed-forward; those a token takes.
        axes_dims_rope: Channels of a head for index, row and column.
        llama_layers: The layer of Llama that each layer here looks at.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT})

    def __init__(
        self,
        patch_size: int = 2,
        in_channels: int = 16,
        out_channels: int = 16,
        num_layers: int = 16,
        num_single_layers: int = 32,
        attention_head_dim: int = 128,
        num_attention_heads: int = 20,
        caption_channels: Sequence[int] = (4096, 4096),
        text_emb_dim: int = 2048,
        num_routed_experts: int = 4,
        num_activated_experts: int = 2,
        axes_dims_rope: Sequence[int] = (64, 32, 32),
        llama_layers: Sequence[int] = (),
        ff_dim: int | None = None,
        shared_ff_dim: int | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        layers = num_layers + num_single_layers
        if sum(axes_dims_rope) != attention_head_dim:
            raise ValueError(
                f"positions take {sum(axes_dims_rope)} channels of heads of {attention_head_dim}"
            )
        if len(llama_layers) != layers:
            raise ValueError(f"{len(llama_layers)} layers of Llama for {layers} layers here")
        parts = {"operations": operations, "dtype": dtype, "device": device}
        width = attention_head_dim * num_attention_heads
        hidden = FEED_FORWARD * width
        sizes = Sizes(
            width,
            num_attention_heads,
            num_routed_experts,
            num_activated_experts,
            ff_dim or inner_width(hidden),
            shared_ff_dim or inner_width(hidden // 2),
        )
        cell = patch_size**2
        self.dtype, self.patch_size, self.llama_layers = dtype, patch_size, list(llama_layers)
        self.t_embedder = _Embedder("timestep_embedder", TIME_WAVES, width, **parts)
        self.p_embedder = _Embedder("pooled_embedder", text_emb_dim, width, **parts)
        self.x_embedder = Projection("proj", cell * in_channels, width, True, **parts)
        self.pe_embedder = EmbedND(attention_head_dim, THETA, list(axes_dims_rope))
        self.double_stream_blocks = nn.ModuleList(
            Held(DoubleBlock(sizes, **parts)) for _ in range(num_layers)
        )
        self.single_stream_blocks = nn.ModuleList(
            Held(SingleBlock(sizes, **parts)) for _ in range(num_single_layers)
        )
        self.final_layer = OutEmbed(width, cell * out_channels, **parts)
        widths = [caption_channels[1]] * layers + [caption_channels[0]]
        self.caption_projection = nn.ModuleList(
            Projection("linear", text_width, width, False, **parts) for text_width in widths
        )

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        context: Tensor | None = None,
        encoder_hidden_states_llama3: Tensor | None = None,
        image_cond: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, H, W]``.
            t: Times ``[B]`` in 0..1000.
            y: Pooled text ``[B, P]``.
            context: T5's states ``[B, L, D]``.
            encoder_hidden_states_llama3: Llama's, of all layers ``[B, layers, M, D]``.
            image_cond: Latent ``[B, C, H, W]`` of a picture to change, seen beside the latent.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, t, y, context, encoder_hidden_states_llama3, image_cond, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        context: Tensor | None = None,
        encoder_hidden_states_llama3: Tensor | None = None,
        image_cond: Tensor | None = None,
        transformer_options: Options | None = None,
        **_: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        if context is None or encoder_hidden_states_llama3 is None or y is None:
            raise ValueError(
                "HiDream looks at states of T5 and Llama and at pooled text, and some of them are "
                "missing; encode the text with the text encoders of HiDream"
            )
        height, width = x.shape[-2:]
        p = self.patch_size
        shown = x if image_cond is None else torch.cat([x, image_cond], dim=-1)
        padded = pad_to_patch_size(shown, (p, p))
        rows, columns = (size // p for size in padded.shape[-2:])
        cells = rearrange(padded, "b c (h p) (w q) -> b (h w) (p q c)", p=p, q=p)
        img = self.x_embedder(cells)
        vec = self.t_embedder(timestep_embedding(t, TIME_WAVES).to(x.dtype)) + self.p_embedder(y)
        states = encoder_hidden_states_llama3
        projected = [
            # a Llama of fewer layers is looked at where it ends
            self.caption_projection[place](states[:, min(layer, states.shape[1] - 1)])
            for place, layer in enumerate(self.llama_layers)
        ]
        first = torch.cat([self.caption_projection[-1](context), projected[-1]], dim=1)
        length = first.shape[1] + states.shape[2]
        freqs = self.pe_embedder(_positions(rows, columns, length, x.device))
        img = self._run_layers(img, first, projected, vec, freqs, options)
        out = self.final_layer(img, vec)
        out = rearrange(out, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=p, q=p)
        return -out[..., :height, :width]

    def _run_layers(
        self,
        img: Tensor,
        first: Tensor,
        projected: Sequence[Tensor],
        vec: Tensor,
        freqs: Tensor,
        options: Options,
    ) -> Tensor:
        """The picture's tokens after all layers."""
        table = (options.get("patches_replace") or {}).get("dit") or {}
        picture = (0, img.shape[1])
        kept = first.shape[1]
        shared = {"vec": vec, "pe": freqs, "transformer_options": options}
        doubles = len(self.double_stream_blocks)
        options["total_blocks"], options["block_type"] = doubles, "double"
        for number, block in enumerate(self.double_stream_blocks):
            options["block_index"] = number

            def original(args: Mapping[str, Any], block: nn.Module = block) -> Options:
                told = args.get("transformer_options") or {}
                made = block(args["img"], args["txt"], args["vec"], args["pe"], told, picture)
                return {"img": made[0], "txt": made[1]}

            txt = torch.cat([first, projected[number]], dim=1)
            args = {"img": img, "txt": txt, **shared}
            out = _replaced(table.get(("double_block", number)), args, original)
            img, first = out["img"], out["txt"][:, :kept]
        joined = torch.cat([img, first], dim=1)
        length = joined.shape[1]
        options["total_blocks"], options["block_type"] = len(self.single_stream_blocks), "single"
        for number, block in enumerate(self.single_stream_blocks):
            options["block_index"] = number

            def one_stream(args: Mapping[str, Any], block: nn.Module = block) -> Options:
                told = args.get("transformer_options") or {}
                return {"img": block(args["img"], args["vec"], args["pe"], told, picture)}

            args = {"img": torch.cat([joined, projected[doubles + number]], dim=1), **shared}
            out = _replaced(table.get(("single_block", number)), args, one_stream)
            joined = out["img"][:, :length]
        return joined[:, : picture[1]]


def _positions(rows: int, columns: int, length: int, device: Any) -> Tensor:
    """Index, row and column ``[1, L, 3]`` of the patches; those of text are all 0."""
    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)
    return torch.cat([ids.flatten(0, 1), ids.new_zeros(length, 3)])[None]


def _replaced(
    replacement: Callable[..., Options] | None,
    args: Options,
    original: Callable[[Mapping[str, Any]], Options],
) -> Options:
    """One layer, or what a custom node put in its place."""
    if replacement is None:
        return original(args)
    return replacement(args, {"original_block": original})
