"""Self-attention guidance: away from an estimate blurred where the model looks.

Source: Hong et al. 2023, https://arxiv.org/abs/2210.00939.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from comfy.nn import attention
from comfy.nn.attention.shapes import merge_heads, split_heads
from comfy.sampling import batching
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_extras.guidance import Facts, for_further_estimate

BLUR_KERNEL = 9
ATTENTION_THRESHOLD = 1.0
SMALLEST_SIDE = 5  # of a latent that can be blurred with the kernel's reflection


def gaussian_blur_2d(img: Tensor, kernel_size: int, sigma: float) -> Tensor:
    """Blur [B, C, H, W] with a square Gaussian kernel; edges are reflected."""
    half = (kernel_size - 1) / 2
    places = torch.linspace(-half, half, kernel_size, device=img.device, dtype=img.dtype)
    line = torch.exp(-0.5 * (places / sigma) ** 2)
    line = line / line.sum()
    kernel = torch.outer(line, line).expand(img.shape[1], 1, kernel_size, kernel_size)
    padded = torch.nn.functional.pad(img, [kernel_size // 2] * 4, mode="reflect")
    return torch.nn.functional.conv2d(padded, kernel, groups=img.shape[1])


def grid_of(tokens: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of a token grid whose proportions are closest to a latent's."""
    rows = round(math.sqrt(height / width * tokens))
    for distance in range(tokens):
        for candidate in (rows + distance, max(1, rows - distance)):
            if tokens % candidate == 0:
                return candidate, tokens // candidate
    return tokens, 1


def create_blur_map(
    x0: Tensor, attn: Tensor, sigma: float = 3.0, threshold: float = ATTENTION_THRESHOLD
) -> Tensor:
    """The estimate, blurred in the cells that attract much attention.

    Args:
        x0: The clean estimate [B, C, H, W].
        attn: Attention [B * heads, tokens, tokens], rows summing to 1.
        threshold: What a cell must attract at least; 1 is the average.
    """
    batch, _, height, width = x0.shape
    received = attn.reshape(batch, -1, *attn.shape[1:]).mean(1).sum(1)
    rows, columns = grid_of(received.shape[-1], height, width)
    mask = (received > threshold).reshape(batch, 1, rows, columns).to(x0.dtype)
    mask = torch.nn.functional.interpolate(mask, (height, width))
    return gaussian_blur_2d(x0, BLUR_KERNEL, sigma) * mask + x0 * (1 - mask)


class AttentionRecorder:
    """Self-attention that keeps the scores of the negative entry.

    Of several negative entries that can share a call it is the first one there, also where memory
    keeps them apart; of those that cannot, the last.
    """

    def __init__(self) -> None:
        self.scores: Tensor | None = None
        self._group: Any = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extra_options: dict[str, Any]) -> Tensor:
        heads, order = extra_options["n_heads"], extra_options["cond_or_uncond"]
        group = extra_options.get(batching.CALL_GROUP, order)
        if 1 not in group:
            return attention.optimized_attention(
                q, k, v, heads, attn_precision=extra_options.get("attn_precision")
            )
        queries, keys, values = (split_heads(part, heads) for part in (q, k, v))
        scale = queries.shape[-1] ** -0.5
        weights = (queries.float() @ keys.float().transpose(-1, -2) * scale).softmax(dim=-1)
        if 1 in order and group is not self._group:
            self._group = group
            item, start = q.shape[0] // len(order), order.index(1)
            self.scores = weights[start * item : (start + 1) * item].flatten(0, 1)
        return merge_heads(weights.to(values.dtype) @ values)


class SelfAttentionGuidance(io.ComfyNode):
    """Adds the difference to an estimate made from a latent that is blurred where it matters."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SelfAttentionGuidance",
            display_name="Self-Attention Guidance",
            category="_for_testing",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                io.Float.Input("scale", default=0.5, min=-2.0, max=5.0, step=0.01),
                io.Float.Input("blur_sigma", default=2.0, min=0.0, max=10.0, step=0.1),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, scale: float, blur_sigma: float) -> io.NodeOutput:
        recorder = AttentionRecorder()

        def change(facts: Facts) -> Tensor:
            guided, uncond = facts["denoised"], facts["uncond_denoised"]
            scores = recorder.scores
            if min(guided.shape[2:]) < SMALLEST_SIDE or scores is None or blur_sigma == 0:
                recorder.scores = None
                return guided
            degraded = create_blur_map(uncond, scores, blur_sigma)
            options = for_further_estimate(facts["model_options"], "SelfAttentionGuidance")
            (estimate,) = batching.calc_cond_batch(
                facts["model"],
                [facts["uncond"]],
                degraded + facts["input"] - uncond,
                facts["sigma"],
                options,
            )
            recorder.scores = None  # they are large, and of another level at the next step
            return guided + (degraded - estimate) * scale

        view = model.clone()
        view.set_model_sampler_post_cfg_function(change, disable_cfg1_optimization=True)
        view.set_model_attn1_replace(recorder, "middle", 0, 0)
        return io.NodeOutput(view)

    patch = execute


comfy_entrypoint = entrypoint_of(SelfAttentionGuidance)
