"""Values that travel between nodes and are no tensors."""

from comfy_api.latest._util.geometry_types import MESH, VOXEL, File3D
from comfy_api.latest._util.image_types import SVG
from comfy_api.latest._util.video_types import VideoCodec, VideoComponents, VideoContainer

__all__ = ["MESH", "SVG", "VOXEL", "File3D", "VideoCodec", "VideoComponents", "VideoContainer"]
