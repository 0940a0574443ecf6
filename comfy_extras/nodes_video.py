"""Nodes that read, make, take apart and write videos."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import folder_paths
from comfy_api.internal.watched_file import partial_file
from comfy_api.latest import InputImpl, Types, io, ui
from comfy_api.latest._input import VideoInput
from comfy_api.latest.ui.metadata import workflow_texts
from comfy_execution.context import check_interrupt
from comfy_extras.extension import entrypoint_of
from comfy_extras.thread_priority import ordinary_priority
from comfy_nodes.picture_basics import colours_of

CATEGORY = "image/video"
WEBM_CODECS = {"vp9": ("libvpx-vp9", "yuv420p"), "av1": ("libsvtav1", "yuv420p10le")}
RATE_STEPS = 1000  # parts of a frame a second that are kept
LONGEST = 1e5  # seconds


class SaveWEBM(io.ComfyNode):
    """Writes pictures as a WebM video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveWEBM",
            category=CATEGORY,
            is_experimental=True,
            is_output_node=True,
            inputs=[
                io.Image.Input("images"),
                io.String.Input("filename_prefix", default="ComfyUI"),
                io.Combo.Input("codec", options=list(WEBM_CODECS)),
                io.Float.Input("fps", default=24.0, min=0.01, max=1000.0, step=0.01),
                io.Float.Input(
                    "crf",
                    default=32.0,
                    min=0,
                    max=63.0,
                    step=1,
                    tooltip="Higher: smaller files of lower quality.",
                ),
            ],
            outputs=[],
        )

    @classmethod
    def execute(
        cls, images: Tensor, codec: str, fps: float, filename_prefix: str, crf: float
    ) -> io.NodeOutput:
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix,
            folder_paths.get_output_directory(),
            images[0].shape[1],
            images[0].shape[0],
        )
        file = f"{name}_{counter:05}_.webm"
        path = os.path.join(folder, file)
        write_webm(path, images, codec, fps, crf, workflow_texts(cls))
        saved = ui.SavedResult(file, subfolder, io.FolderType.output)
        return io.NodeOutput(ui=ui.PreviewVideo([saved]))


def write_webm(
    path: str, images: Tensor, codec: str, fps: float, crf: float, texts: dict[str, str]
) -> None:
    """Writes pictures [T, H, W, C] in 0..1; nothing is left of a file that was not finished.

    Raises:
        ValueError: The encoder does not take them.
    """
    import av

    encoder, pixel_format = WEBM_CODECS[codec]
    with partial_file(path) as target, av.open(target, mode="w", format="webm") as container:
        container.metadata.update(texts)
        rate = Fraction(round(fps * RATE_STEPS), RATE_STEPS)
        stream: Any = container.add_stream(encoder, rate=rate)
        stream.height, stream.width = images.shape[1:3]
        stream.pix_fmt = pixel_format
        stream.bit_rate = 0  # the quality decides
        stream.options = {"crf": str(crf)}
        if codec == "av1":
            stream.options["preset"] = "6"
        try:
            with ordinary_priority():
                stream.codec_context.open()
        except av.error.ArgumentError as error:
            raise ValueError(
                f"images, codec: {codec} does not encode pictures of {images.shape[2]} x "
                f"{images.shape[1]} at {fps:g} frames a second ({error}); take larger pictures or "
                "another codec"
            ) from error
        for image in images:
            check_interrupt()
            pixels = (colours_of(image) * 255).clamp(0, 255).to("cpu", torch.uint8).numpy()
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


class SaveVideo(io.ComfyNode):
    """Writes a video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveVideo",
            display_name="Save Video",
            category=CATEGORY,
            description="Saves a video to the output folder.",
            is_output_node=True,
            inputs=[
                io.Video.Input("video"),
                io.String.Input("filename_prefix", default="video/ComfyUI"),
                io.Combo.Input("format", options=Types.VideoContainer.as_input(), default="auto"),
                io.Combo.Input("codec", options=Types.VideoCodec.as_input(), default="auto"),
            ],
            outputs=[],
        )

    @classmethod
    def execute(
        cls, video: VideoInput, filename_prefix: str, format: str, codec: str
    ) -> io.NodeOutput:
        width, height = video.get_dimensions()
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory(), width, height
        )
        file = f"{name}_{counter:05}_.{Types.VideoContainer.get_extension(format)}"
        texts = {key: json.loads(text) for key, text in workflow_texts(cls).items()}
        video.save_to(
            os.path.join(folder, file),
            format=Types.VideoContainer(format),
            codec=Types.VideoCodec(codec),
            metadata=texts or None,
        )
        saved = ui.SavedResult(file, subfolder, io.FolderType.output)
        return io.NodeOutput(ui=ui.PreviewVideo([saved]))


class CreateVideo(io.ComfyNode):
    """Makes a video of pictures and a sound."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CreateVideo",
            display_name="Create Video",
            category=CATEGORY,
            description="Makes a video of pictures.",
            inputs=[
                io.Image.Input("images"),
                io.Float.Input("fps", default=30.0, min=1.0, max=120.0, step=1.0),
                io.Audio.Input("audio", optional=True),
            ],
            outputs=[io.Video.Output()],
        )

    @classmethod
    def execute(cls, images: Tensor, fps: float, audio: Any = None) -> io.NodeOutput:
        parts = Types.VideoComponents(images=images, audio=audio, frame_rate=Fraction(fps))
        return io.NodeOutput(InputImpl.VideoFromComponents(parts))


class GetVideoComponents(io.ComfyNode):
    """Takes a video apart."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GetVideoComponents",
            display_name="Get Video Components",
            category=CATEGORY,
            description="Gives the pictures, the sound and the frame rate of a video.",
            inputs=[io.Video.Input("video")],
            outputs=[
                io.Image.Output(display_name="images"),
                io.Audio.Output(display_name="audio"),
                io.Float.Output(display_name="fps"),
            ],
        )

    @classmethod
    def execute(cls, video: VideoInput) -> io.NodeOutput:
        parts = video.get_components()
        return io.NodeOutput(parts.images, parts.audio, float(parts.frame_rate))


class VideoSlice(io.ComfyNode):
    """Cuts a piece out of a video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def seconds(
            id: str, tooltip: str, least: float, most: float | None = None
        ) -> io.Float.Input:
            return io.Float.Input(id, tooltip=tooltip, default=0.0, min=least, max=most, step=0.001)

        return io.Schema(
            node_id="Video Slice",
            display_name="Trim Video",
            category=CATEGORY,
            description="Cuts a piece out of a video, with its sound.",
            inputs=[
                io.Video.Input("video"),
                seconds("start_time", "First second; below 0 from the end.", -LONGEST, LONGEST),
                seconds("duration", "Seconds; 0 for all that is left.", 0.0),
                io.Boolean.Input(
                    "strict_duration",
                    default=False,
                    tooltip="Whether a video that ends before is an error.",
                ),
            ],
            outputs=[io.Video.Output()],
        )

    @classmethod
    def execute(
        cls, video: VideoInput, start_time: float, duration: float, strict_duration: bool
    ) -> io.NodeOutput:
        if not duration >= 0:
            raise ValueError(f"duration: expected 0 (all that is left) or more, found {duration:g}")
        piece = video.as_trimmed(start_time, duration, strict_duration)
        if piece is None:
            wanted = f"{duration:g} seconds of it" if duration else "the rest of it"
            raise ValueError(
                f"start_time, duration: the video lasts {video.get_duration():g} seconds, and "
                f"{wanted} from {start_time:g} seconds on cannot be cut; start earlier, or take a "
                "shorter piece"
            )
        if piece.get_frame_count() < 1:
            raise ValueError(
                f"duration: {piece.get_duration():g} seconds from {start_time:g} seconds on are "
                f"less than one of {float(video.get_frame_rate()):g} pictures a second; take a "
                "longer piece, or start earlier"
            )
        return io.NodeOutput(piece)


class LoadVideo(io.ComfyNode):
    """Reads a video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        folder = folder_paths.get_input_directory()
        names = os.listdir(folder) if os.path.isdir(folder) else []
        videos = sorted(folder_paths.filter_files_content_types(names, ["video"]))
        return io.Schema(
            node_id="LoadVideo",
            display_name="Load Video",
            category=CATEGORY,
            inputs=[io.Combo.Input("file", options=videos, upload=io.UploadType.video)],
            outputs=[io.Video.Output()],
        )

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        return io.NodeOutput(InputImpl.VideoFromFile(folder_paths.get_annotated_filepath(file)))

    @classmethod
    def fingerprint_inputs(cls, file: str) -> float:
        return os.path.getmtime(folder_paths.get_annotated_filepath(file))

    @classmethod
    def validate_inputs(cls, file: str) -> bool | str:
        if not folder_paths.exists_annotated_filepath(file):
            return f"Invalid video file: {file}"
        return True


comfy_entrypoint = entrypoint_of(
    SaveWEBM, SaveVideo, CreateVideo, GetVideoComponents, LoadVideo, VideoSlice
)
