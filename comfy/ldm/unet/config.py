"""What a UNet of the Stable Diffusion line is made of; every size can be read from a file's shapes.

Head counts and norm groups leave no trace in shapes: ``num_heads`` (or ``num_head_channels``) and
``norm_num_groups`` have the usual values of the family unless a file says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

# Options of the original training code that change nothing in inference.
TRAINING_ONLY = frozenset(
    {
        "use_checkpoint",
        "image_size",
        "legacy",
        "use_new_attention_order",
        "use_fp16",
        "n_embed",
        "num_heads_upsample",
        "num_attention_blocks",
    }
)
NO_MIDDLE_TRANSFORMER = -1
NO_MIDDLE_BLOCK = -2


@dataclass(frozen=True)
class UNetConfig:
    """Sizes and switches of one UNet.

    Attributes:
        in_channels: Channels of the input (latent and whatever is concatenated to it).
        model_channels: Channels of the first level; also the width of the timestep embedding.
        out_channels: Channels of the output.
        num_res_blocks: Residual blocks per level (one number for all, or one each).
        channel_mult: Channels of each level as multiples of model_channels.
        transformer_depth: Transformer layers after each residual block going down.
        transformer_depth_output: Likewise coming up, in the order of the mirrored input blocks.
        transformer_depth_middle: Layers in the middle; -1: no transformer there, -2: no middle.
        context_dim: Width of the cross-attention context; None for a network without one.
        num_heads: Attention heads, or -1 when num_head_channels decides.
        num_head_channels: Channels per head, or -1 when num_heads decides.
        norm_num_groups: Groups of every group norm.
        num_classes: None, "sequential" (a vector y of adm_in_channels) or "continuous".
        adm_in_channels: Width of the vector y.
        use_linear_in_transformer: Linear instead of 1x1 convolution around a transformer.
        max_ddpm_temb_period: Largest period of the timestep embedding.
    """

    in_channels: int
    model_channels: int
    out_channels: int
    num_res_blocks: int | Sequence[int]
    channel_mult: Sequence[int] = (1, 2, 4, 8)
    transformer_depth: int | Sequence[int] = 1
    transformer_depth_output: Sequence[int] | None = None
    transformer_depth_middle: int | None = None
    context_dim: int | Sequence[int] | None = None
    num_heads: int = -1
    num_head_channels: int = -1
    norm_num_groups: int = 32
    num_classes: int | str | None = None
    adm_in_channels: int | None = None
    use_linear_in_transformer: bool = False
    use_spatial_transformer: bool = True
    dropout: float = 0.0
    dims: int = 2
    conv_resample: bool = True
    use_scale_shift_norm: bool = False
    resblock_updown: bool = False
    disable_self_attentions: Sequence[bool] | None = None
    disable_middle_self_attn: bool = False
    max_ddpm_temb_period: float = 10000
    attn_precision: Any = None
    use_temporal_resblock: bool = False
    use_temporal_attention: bool = False
    time_context_dim: int | None = None
    extra_ff_mix_layer: bool = False
    use_spatial_context: bool = False
    merge_strategy: str | None = None
    merge_factor: float = 0.0
    video_kernel_size: int | Sequence[int] | None = None
    disable_temporal_crossattention: bool = False
    blocks_per_level: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        blocks = self.num_res_blocks
        if isinstance(blocks, int):
            blocks = [blocks] * len(self.channel_mult)
        if len(blocks) != len(self.channel_mult):
            raise ValueError(
                f"num_res_blocks has {len(blocks)} levels, "
                f"channel_mult has {len(self.channel_mult)}"
            )
        object.__setattr__(self, "blocks_per_level", tuple(blocks))
        if not self.use_spatial_transformer:
            raise ValueError("only UNets with spatial transformers are supported")
        if self.has_transformers and self.num_heads == -1 and self.num_head_channels == -1:
            raise ValueError("either num_heads or num_head_channels has to be given")
        if self.model_channels % self.norm_num_groups:
            raise ValueError(
                f"model_channels {self.model_channels} is not divisible into "
                f"{self.norm_num_groups} norm groups"
            )

    @classmethod
    def from_options(cls, **options: Any) -> UNetConfig:
        """Build from keyword options as checkpoints' configurations name them.

        Raises TypeError for an option that no UNet has.
        """
        known = {item.name for item in fields(cls) if item.init}
        unknown = sorted(options.keys() - known - TRAINING_ONLY)
        if unknown:
            raise TypeError(f"unknown UNet options: {', '.join(unknown)}")
        return cls(**{name: value for name, value in options.items() if name in known})

    @property
    def has_transformers(self) -> bool:
        """Whether any block holds a transformer."""
        return any(self.depths_down) or any(self.depths_up) or self.depth_middle > 0

    @property
    def depths_down(self) -> list[int]:
        """Transformer depth after each residual block going down."""
        depth = self.transformer_depth
        if isinstance(depth, int):
            return [depth] * sum(self.blocks_per_level)
        if len(depth) == len(self.channel_mult) != sum(self.blocks_per_level):
            return [d for d, blocks in zip(depth, self.blocks_per_level) for _ in range(blocks)]
        if len(depth) != sum(self.blocks_per_level):
            raise ValueError(
                f"transformer_depth has {len(depth)} entries for "
                f"{sum(self.blocks_per_level)} residual blocks"
            )
        return list(depth)

    @property
    def depths_up(self) -> list[int]:
        """Transformer depth after each residual block coming up, mirrored (the last is used
        first)."""
        if self.transformer_depth_output is not None:
            expected = sum(blocks + 1 for blocks in self.blocks_per_level)
            if len(self.transformer_depth_output) != expected:
                raise ValueError(
                    f"transformer_depth_output has {len(self.transformer_depth_output)} entries, "
                    f"{expected} output blocks need one each"
                )
            return list(self.transformer_depth_output)
        depths, mirrored = iter(self.depths_down), []
        for blocks in self.blocks_per_level:
            level = [next(depths) for _ in range(blocks)]
            mirrored += [*level, level[-1] if level else 0]
        return mirrored

    @property
    def depth_middle(self) -> int:
        """Transformer depth of the middle block, or one of the NO_MIDDLE_ values."""
        if self.transformer_depth_middle is not None:
            return self.transformer_depth_middle
        return self.depths_down[-1]

    def heads(self, channels: int) -> tuple[int, int]:
        """Number of heads and channels per head of an attention over ``channels``."""
        if self.num_head_channels == -1:
            return self.num_heads, channels // self.num_heads
        return channels // self.num_head_channels, self.num_head_channels
