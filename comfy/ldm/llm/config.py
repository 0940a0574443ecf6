"""Sizes of decoder language models, and what tells one kind from another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from comfy.ldm.llm.delta import DeltaSizes
from comfy.nn.config import NetworkConfig


@dataclass(frozen=True)
class LLMConfig(NetworkConfig):
    """Sizes of one model; defaults are those of Qwen 3 4B.

    Attributes:
        num_key_value_heads: Heads of keys and values; several heads of queries share one.
        qkv_bias: Whether the projections have biases (Qwen 2.5).
        qk_norm: Whether queries and keys are normed (Qwen 3).
        rope_dims: Angles of a head that follow a token's place in time, height and width, for
            models that take pictures; None: all follow one number.
        rope_interleaved: Whether the three take turns from the first angle on, and what is left
            follows time (Qwen 3 VL); else each has its angles side by side.
        rope_part: Part of a head's channels that places turn.
        final_norm: Whether the last states are normed (not where the last layers were cut off).
        transformer_type: "gemma2" and "gemma3" also norm what attention and feed-forward give,
            count the weights of norms from 1, have GELU for SiLU, and multiply embeddings by the
            root of their width. "qwen35" counts norms from 1 and gates what attention gives.
        rope_theta, rope_scale: Longest wave of places, and what they are divided by; two of each
            where layers that see all tokens and layers that see near ones differ.
        sliding_attention: How many tokens a layer sees, False for all; repeated over the layers.
        lm_head: Whether a file has a layer of its own that turns states into words; else the token
            table does.
        ties_words: Whether the token table turns states into words in files without such a layer.
        delta, delta_layers: Sizes of attention by the gated delta rule, and the numbers of the
            layers that have it (Qwen 3.5).
        score_cap, word_cap: Bounds of attention's scores and of the scores of words in Gemma 2,
            where it writes. As a text encoder its published users leave the first out.
    """

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float | Sequence[float] = 1000000.0
    rope_scale: Sequence[float] | None = None
    qkv_bias: bool = False
    qk_norm: bool = True
    rope_dims: Sequence[int] | None = None
    rope_interleaved: bool = False
    rope_part: float = 1.0
    final_norm: bool = True
    transformer_type: str = "llama"
    sliding_attention: Sequence[int | bool] | None = None
    lm_head: bool = False
    ties_words: bool = True
    delta: DeltaSizes | None = None
    delta_layers: Sequence[int] = ()
    score_cap: float | None = None
    word_cap: float | None = None

    @property
    def is_gemma(self) -> bool:
        """Whether this is a Gemma 2 or 3."""
        return self.transformer_type.startswith("gemma")

    @property
    def counts_norms_from_one(self) -> bool:
        """Whether weights of norms are what is added to 1."""
        return self.is_gemma or self.is_gated

    @property
    def is_gated(self) -> bool:
        """Whether what attention gives is gated."""
        return self.transformer_type == "qwen35"

    @property
    def turned(self) -> int:
        """Channels of a head that places turn."""
        return int(self.head_dim * self.rope_part)

    def window(self, layer: int) -> int:
        """How many tokens a layer sees; 0 for all."""
        windows = self.sliding_attention
        return int(windows[layer % len(windows)]) if windows else 0

    def waves(self, is_near: bool) -> tuple[float, float]:
        """Longest wave and divisor of places, in layers that see near tokens or all."""
        theta, scale = self.rope_theta, self.rope_scale
        longest = theta if isinstance(theta, (int, float)) else theta[is_near]
        return float(longest), 1.0 if scale is None else scale[is_near]

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads cannot share {self.num_key_value_heads} heads "
                "of keys"
            )
        if self.delta_layers and self.delta is None:
            raise ValueError(f"layers {list(self.delta_layers)} need sizes of the delta rule")
        if self.rope_dims is not None and 2 * sum(self.rope_dims) != self.turned:
            raise ValueError(
                f"rope_dims {list(self.rope_dims)} do not add up to half of the {self.turned} "
                f"channels that are turned of head_dim {self.head_dim}"
            )
