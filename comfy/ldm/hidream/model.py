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
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.flux.layers import EmbedND
from comfy.ldm.hidream.layers import (  # noqa: F401 - packs look here for the layers
    NORM_EPS,
    FeedForwardSwiGLU,
    HiDreamAttention,
    HiDreamImageBlock,
    HiDreamImageSingleTransformerBlock,
    HiDreamImageTransformerBlock,
    MOEFeedForwardSwiGLU,
    Options,
    Sizes,
    inner_width,
)
from comfy.nn import patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

TIME_WAVES = 256
THETA = 10000
FEED_FORWARD = 4  # times the width


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
            HiDreamImageBlock(HiDreamImageTransformerBlock(sizes, **parts))
            for _ in range(num_layers)
        )
        self.single_stream_blocks = nn.ModuleList(
            HiDreamImageBlock(HiDreamImageSingleTransformerBlock(sizes, **parts))
            for _ in range(num_single_layers)
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
