"""Guidance of LTX-2: one scale for its pictures, another for its sound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from comfy.sampling import guidance
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of


class Guider_LTXVDualCFG(guidance.CFGGuider):
    """Classifier-free guidance of a packed latent: a scale for each of its two members.

    Scales that are equal are one scale, also for guidance hooks of the model. Where they differ
    hooks are given a tensor [1, 1, N] for `cond_scale`, a number for each of the packed latent.
    """

    video_cfg, audio_cfg = 1.0, 1.0
    has_one_scale = False
    _shapes: Sequence[Sequence[int]] = ()  # of the members, in order of packing

    def set_cfg(self, video_cfg: float, audio_cfg: float) -> None:  # type: ignore[override]
        """Scale of the first member and of the second; a latent of one kind has the first."""
        self.video_cfg, self.audio_cfg = video_cfg, audio_cfg
        super().set_cfg(video_cfg)

    def outer_sample(self, *args: Any, **kwargs: Any) -> Tensor:
        """As of every guider; what is packed together is told here."""
        self._shapes = kwargs.get("latent_shapes") or ()
        return super().outer_sample(*args, **kwargs)

    def predict_noise(
        self,
        x: Tensor,
        timestep: Tensor,
        model_options: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Clean estimate of x under both scales."""
        if len(self._shapes) != 2 or math.isclose(self.video_cfg, self.audio_cfg):
            return super().predict_noise(x, timestep, model_options, seed)
        return guidance.sampling_function(
            self.inner_model, x, timestep, self.conds.get("negative"), self.conds.get("positive"),
            self._scales(x), model_options=model_options, seed=seed,
        )  # fmt: skip

    def _scales(self, x: Tensor) -> Tensor:
        """A scale for each number of a packed latent [B, 1, N]: [1, 1, N]."""
        of_video = math.prod(self._shapes[0][1:])
        scales = x.new_full((1, 1, x.shape[-1]), self.audio_cfg)
        scales[..., :of_video] = self.video_cfg
        return scales


class LTXVDualCFGGuider(io.ComfyNode):
    """Guides pictures and sound by scales of their own."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def scale(id: str, default: float) -> io.Float.Input:
            return io.Float.Input(id, default=default, min=0.0, max=100.0, step=0.1, round=0.01)

        return io.Schema(
            node_id="LTXVDualCFGGuider",
            display_name="LTXV Dual CFG Guider",
            category="sampling/custom_sampling/guiders",
            description="Guides the pictures and the sound of LTX-2 by scales of their own.",
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                scale("video_cfg", 3.0),
                scale("audio_cfg", 7.0),
            ],
            outputs=[io.Guider.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, positive: Any, negative: Any, video_cfg: float, audio_cfg: float
    ) -> io.NodeOutput:
        guider = Guider_LTXVDualCFG(model)
        guider.set_conds(positive, negative)
        guider.set_cfg(video_cfg, audio_cfg)
        return io.NodeOutput(guider)


comfy_entrypoint = entrypoint_of(LTXVDualCFGGuider)
