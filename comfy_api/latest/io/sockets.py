"""Socket types without a widget of their own: one table, hence its length.

Each row is a class: the type name, and the Python type of the values where one class covers them.
Values that belong to the numerical side (models, encoders, samplers) have the type `Any` here:
this package knows them by name only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

from comfy_api.latest.io.base import ComfyTypeIO, HostType, comfytype

if TYPE_CHECKING:
    from torch import Tensor

    from comfy_api.latest._input.video_types import VideoInput
    from comfy_api.latest._util.geometry_types import MESH as MeshValue
    from comfy_api.latest._util.geometry_types import VOXEL as VoxelValue
    from comfy_api.latest._util.geometry_types import File3D as File3DValue
    from comfy_api.latest._util.image_types import SVG as SvgValue
else:
    Tensor = HostType("torch", "Tensor")
    VideoInput = HostType("comfy_api.latest._input.video_types", "VideoInput")
    File3DValue = HostType("comfy_api.latest._util.geometry_types", "File3D")
    MeshValue = HostType("comfy_api.latest._util.geometry_types", "MESH")
    SvgValue = HostType("comfy_api.latest._util.image_types", "SVG")
    VoxelValue = HostType("comfy_api.latest._util.geometry_types", "VOXEL")

ConditioningList = list[tuple[Any, dict[str, Any]]]


class LatentContents(TypedDict, total=False):
    """A latent: `samples` `[B, C, H, W]` (video `[B, C, T, H, W]`, audio `[B, C, L]`)."""

    samples: Tensor
    noise_mask: Tensor
    batch_index: list[int]
    type: str


class AudioContents(TypedDict):
    """A sound: `waveform` `[B, C, samples]` in -1..1, `sample_rate` in hertz."""

    waveform: Tensor
    sample_rate: int


class TrackContents(TypedDict):
    """Paths of points through a video, and where they are visible."""

    track_path: Tensor
    track_visibility: Tensor


class CameraInfo(TypedDict):
    """Where the camera of a 3D view stands."""

    position: dict[str, float | int]
    target: dict[str, float | int]
    zoom: int
    cameraType: str


class Model3DContents(TypedDict, total=False):
    """Files that the 3D view in the editor rendered, and its camera."""

    image: str
    mask: str
    normal: str
    camera_info: CameraInfo
    recording: str


@comfytype("IMAGE")
class Image(ComfyTypeIO):
    """Pictures `[B, H, W, C]`, float32 in 0..1."""

    Type = Tensor


@comfytype("MASK")
class Mask(ComfyTypeIO):
    """Masks `[B, H, W]`, float32 in 0..1; 1 is selected."""

    Type = Tensor


@comfytype("SIGMAS")
class Sigmas(ComfyTypeIO):
    """Noise levels `[steps + 1]`, descending: standard deviations of the latent."""

    Type = Tensor


@comfytype("LATENT")
class Latent(ComfyTypeIO):
    """A dictionary with `samples`; unknown keys ride along."""

    Type = LatentContents
    LatentDict = LatentContents


@comfytype("CONDITIONING")
class Conditioning(ComfyTypeIO):
    """A list of `[embedding, options]` pairs."""

    Type = ConditioningList


@comfytype("AUDIO")
class Audio(ComfyTypeIO):
    """A mapping with `waveform` and `sample_rate`."""

    Type = AudioContents
    AudioDict = AudioContents


@comfytype("VIDEO")
class Video(ComfyTypeIO):
    """A video file, or pictures and sound that can become one."""

    Type = VideoInput


@comfytype("SVG")
class SVG(ComfyTypeIO):
    """Vector pictures."""

    Type = SvgValue


@comfytype("VOXEL")
class Voxel(ComfyTypeIO):
    """Occupancy on a grid."""

    Type = VoxelValue


@comfytype("MESH")
class Mesh(ComfyTypeIO):
    """Vertices and faces."""

    Type = MeshValue


@comfytype("TRACKS")
class Tracks(ComfyTypeIO):
    """Paths of points through a video."""

    Type = TrackContents
    TrackDict = TrackContents


@comfytype("MODEL")
class Model(ComfyTypeIO):
    """A diffusion model with its patches."""


@comfytype("CLIP")
class Clip(ComfyTypeIO):
    """A text encoder with its tokenizer."""


@comfytype("VAE")
class Vae(ComfyTypeIO):
    """An autoencoder between pictures and latents."""


@comfytype("CONTROL_NET")
class ControlNet(ComfyTypeIO):
    """A network that steers a diffusion model."""


@comfytype("CLIP_VISION")
class ClipVision(ComfyTypeIO):
    """An image encoder."""


@comfytype("CLIP_VISION_OUTPUT")
class ClipVisionOutput(ComfyTypeIO):
    """What an image encoder returned."""


@comfytype("AUDIO_ENCODER")
class AudioEncoder(ComfyTypeIO):
    """A sound encoder."""


@comfytype("AUDIO_ENCODER_OUTPUT")
class AudioEncoderOutput(ComfyTypeIO):
    """What a sound encoder returned."""


@comfytype("STYLE_MODEL")
class StyleModel(ComfyTypeIO):
    """A network that turns image embeddings into conditioning."""


@comfytype("GLIGEN")
class Gligen(ComfyTypeIO):
    """A network that places objects in regions."""


@comfytype("UPSCALE_MODEL")
class UpscaleModel(ComfyTypeIO):
    """A network that enlarges pictures."""


@comfytype("LATENT_UPSCALE_MODEL")
class LatentUpscaleModel(ComfyTypeIO):
    """A network that enlarges latents."""


@comfytype("MODEL_PATCH")
class ModelPatch(ComfyTypeIO):
    """A network that is added to a diffusion model."""


@comfytype("PHOTOMAKER")
class Photomaker(ComfyTypeIO):
    """An identity encoder."""


@comfytype("HYPERNETWORK")
class Hypernetwork(ComfyTypeIO):
    """A network that alters attention."""


@comfytype("SAMPLER")
class Sampler(ComfyTypeIO):
    """A solver with its settings."""


@comfytype("NOISE")
class Noise(ComfyTypeIO):
    """A source of noise: has `seed` and `generate_noise(latent)`."""


@comfytype("GUIDER")
class Guider(ComfyTypeIO):
    """What turns a model and conditioning into a denoised estimate."""


@comfytype("LATENT_OPERATION")
class LatentOperation(ComfyTypeIO):
    """A function from latent to latent."""

    Type = Callable[[Any], Any]


@comfytype("HOOKS")
class Hooks(ComfyTypeIO):
    """Weight changes that depend on the conditioning."""


@comfytype("HOOK_KEYFRAMES")
class HookKeyframes(ComfyTypeIO):
    """Strengths of hooks over the course of sampling."""


@comfytype("TIMESTEPS_RANGE")
class TimestepsRange(ComfyTypeIO):
    """Start and end of a part of sampling, each 0..1."""

    Type = tuple[float, float]


@comfytype("LORA_MODEL")
class LoraModel(ComfyTypeIO):
    """Trained low-rank weights by key."""

    Type = dict[str, Any]


@comfytype("LOSS_MAP")
class LossMap(ComfyTypeIO):
    """Losses of a training run."""

    Type = dict[str, Any]


@comfytype("FLOW_CONTROL")
class FlowControl(ComfyTypeIO):
    """Ties the two ends of a loop together."""

    Type = tuple[str, Any]


@comfytype("ACCUMULATION")
class Accumulation(ComfyTypeIO):
    """Values gathered by a loop."""

    Type = dict[str, Any]


@comfytype("FACE_ANALYSIS")
class FaceAnalysis(ComfyTypeIO):
    """A face detector."""


@comfytype("BBOX")
class BBOX(ComfyTypeIO):
    """Boxes that a detector found."""


@comfytype("SEGS")
class SEGS(ComfyTypeIO):
    """Segments that a detector found."""


@comfytype("POINT")
class Point(ComfyTypeIO):
    """A point in a picture."""


@comfytype("WAN_CAMERA_EMBEDDING")
class WanCameraEmbedding(ComfyTypeIO):
    """A camera path in a video model's own form."""

    Type = Tensor


@comfytype("LOAD3D_CAMERA")
class Load3DCamera(ComfyTypeIO):
    """Where the camera of a 3D view stands."""

    Type = CameraInfo
    CameraInfo = CameraInfo


@comfytype("LOAD_3D")
class Load3D(ComfyTypeIO):
    """The 3D view in the editor."""

    Type = Model3DContents
    Model3DDict = Model3DContents


@comfytype("LOAD_3D_ANIMATION")
class Load3DAnimation(ComfyTypeIO):
    """The 3D view in the editor, with an animation."""

    Type = Model3DContents
    Model3DDict = Model3DContents


@comfytype("AUDIO_RECORD")
class AudioRecord(ComfyTypeIO):
    """A sound recorded in the editor."""

    Type = str


@comfytype("FILE_3D")
class File3DAny(ComfyTypeIO):
    """A 3D file of any format."""

    Type = File3DValue


@comfytype("FILE_3D_GLB")
class File3DGLB(ComfyTypeIO):
    """A binary glTF file."""

    Type = File3DValue


@comfytype("FILE_3D_GLTF")
class File3DGLTF(ComfyTypeIO):
    """A glTF file."""

    Type = File3DValue


@comfytype("FILE_3D_FBX")
class File3DFBX(ComfyTypeIO):
    """An FBX file."""

    Type = File3DValue


@comfytype("FILE_3D_OBJ")
class File3DOBJ(ComfyTypeIO):
    """A Wavefront file."""

    Type = File3DValue


@comfytype("FILE_3D_STL")
class File3DSTL(ComfyTypeIO):
    """A stereolithography file."""

    Type = File3DValue


@comfytype("FILE_3D_USDZ")
class File3DUSDZ(ComfyTypeIO):
    """A zipped universal scene file."""

    Type = File3DValue


@comfytype("*")
class AnyType(ComfyTypeIO):
    """Any value."""
