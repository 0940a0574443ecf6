"""The small CLIP-style text encoder, with the module names of the single-file layout.

128 wide, three layers, two heads, causal attention over 77 tokens, "quick" GELU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.tokens import LENGTH, VOCABULARY_SIZE

WIDTH, LAYERS, HEADS = 128, 3, 2


class SelfAttention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Position-wise network with x sigmoid(1.702 x) in the middle, CLIP's approximation of GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x))


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each after a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.layer_norm1 = SelfAttention(), nn.LayerNorm(WIDTH)
        self.mlp, self.layer_norm2 = FeedForward(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Embeddings(nn.Module):
    """A vector for each token plus one for each place."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary_size, WIDTH)
        self.position_embedding = nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.token_embedding.weight, std=0.5)
        nn.init.normal_(self.position_embedding.weight, std=0.1)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1])
        return self.token_embedding(tokens) + self.position_embedding(positions)


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))

    def forward(self, x: Tensor, skip: int = 0) -> Tensor:
        for layer in self.layers[: LAYERS - skip]:
            x = layer(x)
        return x


class TextTransformer(nn.Module):
    """Token numbers [B, L] to hidden states [B, L, 128]."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary_size)
        self.encoder = Encoder()
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, skip: int = 0, positions: Tensor | None = None) -> Tensor:
        return self.final_layer_norm(self.encoder(self.embeddings(tokens, positions), skip))


class TextEncoder(nn.Module):
    """The text encoder as the checkpoint holds it.

    Training uses a compact vocabulary: the tokens of the captions, behind row 0, which is zero
    and stands for all others. The checkpoint spreads those rows over the whole CLIP table.
    """

    def __init__(self, vocabulary_size: int = VOCABULARY_SIZE) -> None:
        super().__init__()
        self.text_model = TextTransformer(vocabulary_size)
        with torch.no_grad():
            self.text_model.embeddings.token_embedding.weight[0] = 0

    def forward(self, tokens: Tensor, skip: int = 0, positions: Tensor | None = None) -> Tensor:
        """Hidden states after all but the last `skip` layers; `positions` default to 0, 1, ..."""
        return self.text_model(tokens, skip, positions)
