"""Pictures, videos and latents for the Wan models; most nodes are in `comfy_extras.wan`."""

from __future__ import annotations

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_extras.wan.animate import WanAnimateToVideo
from comfy_extras.wan.common import Latent
from comfy_extras.wan.control import (
    Wan22FunControlToVideo,
    WanCameraImageToVideo,
    WanFunControlToVideo,
)
from comfy_extras.wan.pictures import (
    Wan22ImageToVideoLatent,
    WanFirstLastFrameToVideo,
    WanFunInpaintToVideo,
    WanImageToVideo,
    WanPhantomSubjectToVideo,
)
from comfy_extras.wan.sound import (
    WanHuMoImageToVideo,
    WanSoundImageToVideo,
    WanSoundImageToVideoExtend,
)
from comfy_extras.wan.tracks import WanTrackToVideo
from comfy_extras.wan.vace import WanVaceToVideo
from comfy_nodes.latent_basics import VIDEO, samples_of


class TrimVideoLatent(io.ComfyNode):
    """Takes cells off the beginning of a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TrimVideoLatent",
            category="latent/video",
            inputs=[
                io.Latent.Input("samples"),
                io.Int.Input("trim_amount", default=0, min=0, max=99999),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples: Latent, trim_amount: int) -> io.NodeOutput:
        video = samples_of(samples, "samples", VIDEO)
        if trim_amount >= video.shape[2]:
            raise ValueError(
                f"trim_amount: expected less than the {video.shape[2]} cells of the latent, found "
                f"{trim_amount}"
            )
        return io.NodeOutput({**samples, "samples": video[:, :, trim_amount:]})


comfy_entrypoint = entrypoint_of(
    WanImageToVideo,
    WanFunControlToVideo,
    Wan22FunControlToVideo,
    WanFunInpaintToVideo,
    WanFirstLastFrameToVideo,
    WanVaceToVideo,
    TrimVideoLatent,
    WanCameraImageToVideo,
    WanPhantomSubjectToVideo,
    WanTrackToVideo,
    WanSoundImageToVideo,
    WanSoundImageToVideoExtend,
    WanHuMoImageToVideo,
    WanAnimateToVideo,
    Wan22ImageToVideoLatent,
)
