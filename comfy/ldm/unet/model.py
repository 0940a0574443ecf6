"""The UNet of the Stable Diffusion line: blocks going down, a middle, blocks coming up with skips.

Keys follow the original checkpoints: ``time_embed``, ``label_emb``, ``input_blocks.N``,
``middle_block``, ``output_blocks.N``, ``out``. Custom nodes reach in through
``transformer_options`` (see `transformer.py` for attention; ``patches`` here: ``emb_patch``,
``input_block_patch``, ``input_block_patch_after_skip``, ``middle_block_after_patch``,
``output_block_patch``) and through ``control``, lists of residuals to add ("input", "middle",
"output").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.unet import steps
from comfy.ldm.unet.builder import BlockBuilder
from comfy.ldm.unet.config import UNetConfig
from comfy.nn.layout import prefers_channels_last
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

Options = dict[str, Any]
INPUT_AXES = 4  # [B, C, H, W]; frames of a video are items of the batch


READS_PATCHES = frozenset(
    {"attn1", "attn2", "emb_patch", "forward_timestep_embed_patch", "middle_patch"}
    | {"attn1_patch", "attn1_output_patch", "attn2_patch", "attn2_output_patch"}
    | {"input_block_patch", "input_block_patch_after_skip", "output_block_patch"}
    | {"middle_block_after_patch"}
)
"""Names of the patches of custom nodes that this network and its blocks look at."""


class UNetModel(nn.Module):
    """Predicts noise (or whatever it was trained for) from a noisy latent, a timestep and a
    context."""

    reads_patches = READS_PATCHES
    reads_control = frozenset({"input", "middle", "output"})

    def __init__(
        self,
        config: UNetConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **options: Any,
    ) -> None:
        """Build from a config, or from the keyword options a config has (and a few it ignores)."""
        super().__init__()
        self.config = config = config or UNetConfig.from_options(**options)
        self.dtype = dtype
        self.model_channels, self.in_channels = config.model_channels, config.in_channels
        self.out_channels, self.num_classes = config.out_channels, config.num_classes
        self.default_num_video_frames: int | None = None
        build = BlockBuilder(config, {"dtype": dtype, "device": device}, operations)
        self.time_embed = build.embedding(config.model_channels)
        label_embedding = build.label_embedding()
        if label_embedding is not None:
            self.label_emb = label_embedding
        self.input_blocks = build.input_blocks()
        self.middle_block = build.middle_block()
        self.output_blocks = build.output_blocks()
        self.out = build.out()

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor | None = None,
        context: Tensor | None = None,
        y: Tensor | None = None,
        control: dict[str, list[Tensor | None]] | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent (and concatenated channels) ``[B, C, H, W]``.
            timesteps: ``[B]``, as the network was trained (0..999 for discrete schedules).
            context: Text embeddings ``[B, L, D]``.
            y: Vector conditioning ``[B, A]``, for networks with ``num_classes``.
            control: Residuals by part; each list is consumed from its end.
            transformer_options: Patches, wrappers and facts about the step.
            **kwargs: ``num_video_frames``, ``image_only_indicator``, ``time_context`` (video
            networks).
        Returns:
            ``[B, out_channels, H, W]``.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timesteps, context, y, control, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timesteps: Tensor | None = None,
        context: Tensor | None = None,
        y: Tensor | None = None,
        control: dict[str, list[Tensor | None]] | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if x.ndim != INPUT_AXES:
            raise ValueError(
                f"the network takes latents of {INPUT_AXES} axes (batch, channels, rows, columns), "
                f"found one of {x.ndim}, {tuple(x.shape[1:])} after the batch; use an empty latent "
                "of this model's kind"
            )
        options = {} if transformer_options is None else transformer_options
        options["original_shape"] = list(x.shape)
        options["transformer_index"] = 0
        patches = options.get("patches") or {}
        emb = self.embed(timesteps, y, x.dtype, options)
        if prefers_channels_last(x):
            x = x.contiguous(memory_format=torch.channels_last)
        run = _Pass(emb, context, options, self._video_options(kwargs))
        h, skips = x, []
        for number, block in enumerate(self.input_blocks):
            options["block"] = ("input", number)
            h = steps.apply_control(run(block, h), control, "input")
            for patch in patches.get("input_block_patch", ()):
                h = patch(h, options)
            skips.append(h)
            for patch in patches.get("input_block_patch_after_skip", ()):
                h = patch(h, options)

        options["block"] = ("middle", 0)
        if self.middle_block is not None:
            h = run(self.middle_block, h)
        h = steps.apply_control(h, control, "middle")
        for patch in patches.get("middle_block_after_patch", ()):
            facts = {
                "h": h, "x": x, "emb": emb, "context": context, "y": y, "timesteps": timesteps,
                "transformer_options": options,
            }  # fmt: skip
            h = patch(facts)["h"]

        for number, block in enumerate(self.output_blocks):
            options["block"] = ("output", number)
            skip = steps.apply_control(skips.pop(), control, "output")
            for patch in patches.get("output_block_patch", ()):
                h, skip = patch(h, skip, options)
            h = torch.cat([h, skip], dim=1)
            del skip
            h = run(block, h, output_shape=skips[-1].shape if skips else None)
        return self.out(h.to(x.dtype))

    def embed(
        self, timesteps: Tensor | None, y: Tensor | None, dtype: torch.dtype, options: Options
    ) -> Tensor:
        """Embedding of timestep and vector conditioning, ``[B, 4 * model_channels]``."""
        if (y is not None) != (self.num_classes is not None):
            needs = "needs" if self.num_classes is not None else "takes no"
            raise ValueError(f"this UNet {needs} vector conditioning y")
        if timesteps is None:
            raise ValueError("this UNet needs timesteps")
        waves = timestep_embedding(timesteps, self.model_channels, self.config.max_ddpm_temb_period)
        emb = self.time_embed(waves.to(dtype))
        for patch in (options.get("patches") or {}).get("emb_patch", ()):
            emb = patch(emb, self.model_channels, options)
        return emb if y is None else emb + self.label_emb(y)

    def _video_options(self, kwargs: Options) -> Options:
        """What only the temporal layers take."""
        return {
            "num_video_frames": kwargs.get("num_video_frames", self.default_num_video_frames),
            "image_only_indicator": kwargs.get("image_only_indicator"),
            "time_context": kwargs.get("time_context"),
        }


class _Pass:
    """Runs blocks with the arguments that stay the same throughout one forward pass.

    A block is a sequence of layers; torch's ModuleList, which holds them, gives members no type.
    """

    def __init__(
        self, emb: Tensor, context: Tensor | None, options: Options, video: Options
    ) -> None:
        self.emb, self.context, self.options, self.video = emb, context, options, video

    def __call__(self, block: Any, h: Tensor, output_shape: Any = None) -> Tensor:
        return steps.forward_timestep_embed(
            block, h, self.emb, self.context, self.options, output_shape, **self.video
        )
