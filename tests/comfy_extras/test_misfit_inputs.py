"""What nodes say about inputs of another model's kind, and of sizes that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.resize import common_upscale
from comfy_extras import (
    nodes_clip_sdxl,
    nodes_cosmos,
    nodes_flux,
    nodes_hidream,
    nodes_hunyuan,
    nodes_hunyuan3d,
    nodes_kandinsky5,
    nodes_latent,
    nodes_lt,
    nodes_model_advanced,
    nodes_model_downscale,
    nodes_morphology,
    nodes_sd3,
    nodes_sdupscale,
    nodes_stable_cascade,
    nodes_wan,
)
from comfy_extras.audio.editing import EmptyAudio
from comfy_extras.audio.latents import VAEDecodeAudio, VAEEncodeAudio
from comfy_extras.images.batching import BatchLatentsNode
from comfy_extras.masks.compositing import LatentCompositeMasked
from comfy_extras.nodes_images import ImageScaleToMaxDimension, ResizeAndPadImage
from comfy_extras.nodes_ip2p import InstructPixToPixConditioning
from comfy_extras.nodes_post_processing import Blend
from comfy_nodes.latent import (
    EmptyLatentImage,
    LatentFlip,
    LatentRotate,
    LatentUpscale,
    LatentUpscaleBy,
)
from comfy_nodes.latent_joining import LatentBlend, LatentComposite
from comfy_nodes.vae import InpaintModelConditioning, VAEEncodeForInpaint

COND: Any = [[torch.zeros(1, 2, 3), {}]]
PICTURE = torch.rand(1, 64, 64, 3)


class PictureVAE:
    """An autoencoder of Stable Diffusion, as far as nodes see one."""

    latent_channels, output_channels, downscale_ratio = 4, 3, 8
    downscale_index_formula = None

    def spacial_compression_encode(self) -> int:
        return 8

    def encode(self, pixels: Tensor) -> Tensor:
        return torch.zeros(pixels.shape[0], 4, pixels.shape[1] // 8, pixels.shape[2] // 8)


class OneEncoder:
    """Text encoders of which there is one only."""

    def tokenize(self, text: str) -> dict[str, list[str]]:
        return {"l": [text]}


def latent(*shape: int) -> dict[str, Any]:
    return {"samples": torch.arange(float(torch.Size(shape).numel())).reshape(shape)}


@pytest.mark.parametrize(
    ("encode", "missing"),
    [
        (lambda clip: nodes_flux.CLIPTextEncodeFlux.execute(clip, "a", "b", 3.5), "t5xxl"),
        (lambda clip: nodes_sd3.CLIPTextEncodeSD3.execute(clip, "a", "b", "c", "none"), "g"),
        (lambda clip: nodes_sd3.CLIPTextEncodeSD3.execute(clip, "a", "", "", "none"), "g"),
        (lambda clip: nodes_hunyuan.CLIPTextEncodeHunyuanDiT.execute(clip, "a", "b"), "mt5xl"),
        (
            lambda clip: nodes_kandinsky5.CLIPTextEncodeKandinsky5.execute(clip, "a", "b"),
            "qwen25_7b",
        ),
        (
            lambda clip: nodes_hidream.CLIPTextEncodeHiDream.execute(
                clip, clip_l="a", clip_g="b", t5xxl="c", llama="d"
            ),
            "g",
        ),
        (
            lambda clip: nodes_clip_sdxl.CLIPTextEncodeSDXL.execute(
                clip, 64, 64, 0, 0, 64, 64, "a", "b"
            ),
            "g",
        ),
    ],
)
def test_a_missing_text_encoder_is_named(encode: Callable[[Any], Any], missing: str) -> None:
    with pytest.raises(ValueError, match=f"clip: expected a text encoder '{missing}', found l"):
        encode(OneEncoder())


VIDEO_SIZE = (64, 64, 5, 1)  # width, height, length, batch


@pytest.mark.parametrize(
    "make",
    [
        lambda v: nodes_cosmos.CosmosImageToVideoLatent.execute(v, *VIDEO_SIZE, PICTURE),
        lambda v: nodes_cosmos.CosmosPredict2ImageToVideoLatent.execute(v, *VIDEO_SIZE, PICTURE),
        lambda v: nodes_hunyuan.HunyuanImageToVideo.execute(
            COND, v, *VIDEO_SIZE, "v2 (replace)", PICTURE
        ),
        lambda v: nodes_hunyuan.HunyuanVideo15ImageToVideo.execute(
            COND, COND, v, *VIDEO_SIZE, PICTURE
        ),
        lambda v: nodes_hunyuan.HunyuanVideo15SuperResolution.execute(
            COND, COND, latent(1, 32, 2, 4, 4), 0.5, v, PICTURE
        ),
        lambda v: nodes_kandinsky5.Kandinsky5ImageToVideo.execute(
            COND, COND, v, *VIDEO_SIZE, PICTURE
        ),
        lambda v: nodes_lt.LTXVImgToVideo.execute(COND, COND, PICTURE, v, *VIDEO_SIZE, 1.0),
        lambda v: nodes_lt.LTXVImgToVideoInplace.execute(v, PICTURE, latent(1, 128, 2, 2, 2), 1.0),
        lambda v: nodes_wan.WanImageToVideo.execute(COND, COND, v, *VIDEO_SIZE, PICTURE),
        lambda v: nodes_wan.WanFirstLastFrameToVideo.execute(COND, COND, v, *VIDEO_SIZE, PICTURE),
        lambda v: nodes_wan.WanFunControlToVideo.execute(COND, COND, v, *VIDEO_SIZE, PICTURE),
        lambda v: nodes_wan.Wan22FunControlToVideo.execute(COND, COND, v, *VIDEO_SIZE, PICTURE),
        lambda v: nodes_wan.WanCameraImageToVideo.execute(COND, COND, v, *VIDEO_SIZE, PICTURE),
        lambda v: nodes_wan.WanVaceToVideo.execute(COND, COND, v, *VIDEO_SIZE, 1.0),
        lambda v: nodes_wan.Wan22ImageToVideoLatent.execute(v, *VIDEO_SIZE, PICTURE),
    ],
)
def test_video_nodes_refuse_an_autoencoder_of_pictures(make: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"vae: expected a video autoencoder .* found"):
        make(PictureVAE())


@pytest.mark.parametrize(
    ("make", "id"),
    [
        (
            lambda given: nodes_hunyuan.HunyuanVideo15SuperResolution.execute(
                COND, COND, given, 0.5
            ),
            "latent",
        ),
        (
            lambda given: nodes_hunyuan.HunyuanRefinerLatent.execute(COND, COND, given, 0.1),
            "latent",
        ),
        (lambda given: nodes_kandinsky5.NormalizeVideoLatentStart.execute(given, 4, 5), "latent"),
        (
            lambda given: nodes_lt.LTXVImgToVideoInplace.execute(PictureVAE(), PICTURE, given, 1.0),
            "latent",
        ),
        (
            lambda given: nodes_latent.ReplaceVideoLatentFrames.execute(given, 0, given),
            "destination",
        ),
    ],
)
def test_video_nodes_refuse_latents_of_pictures(make: Callable[[Any], Any], id: str) -> None:
    with pytest.raises(ValueError, match=rf"{id}: expected a latent of a video, found .* picture"):
        make(latent(1, 16, 8, 8))


def test_only_joined_latents_can_be_taken_apart() -> None:
    with pytest.raises(ValueError, match="av_latent: expected a latent of video and sound"):
        nodes_lt.LTXVSeparateAVLatent.execute(latent(1, 4, 8, 8))


@pytest.mark.parametrize(
    "join",
    [
        lambda a, b: nodes_latent.LatentAdd.execute(a, b),
        lambda a, b: nodes_latent.LatentSubtract.execute(a, b),
        lambda a, b: nodes_latent.LatentInterpolate.execute(a, b, 0.5),
        lambda a, b: nodes_latent.LatentBatch.execute(a, b),
        lambda a, b: nodes_latent.LatentConcat.execute(a, b, "x"),
        lambda a, b: LatentBlend().blend(a, b, 0.5),
        lambda a, b: LatentComposite().composite(a, b, 0, 0),
        lambda a, b: LatentCompositeMasked.execute(a, b, 0, 0, False),
    ],
)
@pytest.mark.parametrize("other", [(1, 16, 8, 8), (1, 4, 2, 8, 8), (1, 4, 8)])
def test_latents_of_two_models_are_not_joined(
    join: Callable[[Any, Any], Any], other: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"sam.*|source: expected a latent .* found"):
        join(latent(1, 4, 8, 8), latent(*other))


@pytest.mark.parametrize(("x", "y"), [(64, 0), (96, 0), (0, 96)])
def test_nothing_is_pasted_beyond_the_border(x: int, y: int) -> None:
    target = latent(1, 4, 8, 8)
    made = LatentComposite().composite(target, latent(1, 4, 8, 8), x, y)[0]
    assert torch.equal(made["samples"], target["samples"])


def test_errors_name_the_input_of_a_list() -> None:
    with pytest.raises(ValueError, match="latents: expected a latent like the other one"):
        BatchLatentsNode.execute({"latent0": latent(1, 4, 8, 8), "latent1": latent(1, 16, 8, 8)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: EmptyLatentImage().generate(16384, 16384, 4096),
        lambda: nodes_sd3.EmptySD3LatentImage.execute(16384, 16384, 4096),
        lambda: nodes_hunyuan.EmptyHunyuanLatentVideo.execute(16384, 16384, 16381, 4096),
    ],
)
def test_latents_larger_than_the_memory_say_how_large(make: Callable[[], Any]) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"of shape \(4096, .* would take .* GiB"):
        make()


def test_endless_silence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"duration: 1e\+18 s at 44100 Hz"):
        EmptyAudio.execute(1e18, 44100, 2)


def test_a_batch_is_pasted_onto_one_latent_by_its_first() -> None:
    made = LatentComposite().composite(latent(1, 4, 8, 8), latent(3, 4, 8, 8), 0, 0)[0]
    assert torch.equal(made["samples"], latent(3, 4, 8, 8)["samples"][:1])


def test_videos_are_turned_and_mirrored_frame_by_frame() -> None:
    video = latent(1, 2, 3, 4, 5)
    turned = LatentRotate().rotate(video, "90 degrees")[0]["samples"]
    upside_down = LatentFlip().flip(video, "x-axis: vertically")[0]["samples"]
    for frame in range(3):
        single = {"samples": video["samples"][:, :, frame]}
        alone = LatentRotate().rotate(single, "90 degrees")[0]["samples"]
        assert torch.equal(turned[:, :, frame], alone)
        assert torch.equal(upside_down[:, :, frame], single["samples"].flip(-2))


@pytest.mark.parametrize(
    "change",
    [
        lambda given: LatentRotate().rotate(given, "90 degrees"),
        lambda given: LatentFlip().flip(given, "y-axis: horizontally"),
        lambda given: LatentUpscale().upscale(given, "bilinear", 64, 64, "disabled"),
        lambda given: LatentUpscaleBy().upscale(given, "bilinear", 2.0),
    ],
)
def test_sounds_have_no_sides(change: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="samples: expected a latent of a picture or video"):
        change(latent(1, 64, 8))


def test_nothing_shrinks_to_nothing() -> None:
    thin = torch.ones(1, 1, 100, 3)
    padded = ResizeAndPadImage.execute(thin, 10, 10, "black", "area")[0]
    assert padded.sum() == 30
    assert ImageScaleToMaxDimension.execute(thin, "area", 10)[0].shape == (1, 1, 10, 3)
    with pytest.raises(ValueError, match="cannot resize to 0 x 4"):
        common_upscale(torch.zeros(1, 3, 8, 8), 0, 4, "bilinear", "center")


def test_no_features_shrink_to_nothing() -> None:
    made = nodes_model_downscale.shrunk(torch.ones(1, 2, 4, 3), 9.0, "area")
    assert made.shape == (1, 2, 1, 1)


def test_the_smallest_upscale_has_one_cell() -> None:
    made = nodes_sdupscale.SD_4XUpscale_Conditioning.execute(PICTURE, COND, COND, 0.0, 0.0)
    assert made[2]["samples"].shape == (1, 4, 1, 1)


def test_a_picture_smaller_than_a_cell_of_stage_c_is_refused() -> None:
    with pytest.raises(ValueError, match="image: expected sides of at least 42 pixels"):
        nodes_stable_cascade.StableCascade_StageC_VAEEncode.execute(
            torch.zeros(1, 73, 41, 3), PictureVAE(), 42
        )


@pytest.mark.parametrize("masks", [2, 5])
def test_masks_are_one_or_one_for_each_picture(masks: int) -> None:
    given = (PICTURE.repeat(3, 1, 1, 1), torch.ones(masks, 20, 30))
    with pytest.raises(ValueError, match=rf"mask: expected .* \(3\), found {masks}"):
        VAEEncodeForInpaint().encode(PictureVAE(), *given)
    with pytest.raises(ValueError, match=rf"mask: expected .* \(3\), found {masks}"):
        InpaintModelConditioning().encode(COND, COND, given[0], PictureVAE(), given[1])


def test_batches_are_blended_one_by_one_or_with_one() -> None:
    one, two, three = (PICTURE.repeat(count, 1, 1, 1) for count in (1, 2, 3))
    assert Blend.execute(one, three, 0.5, "normal")[0].shape[0] == 3
    with pytest.raises(ValueError, match=r"image2: expected one .* \(3\), found 2"):
        Blend.execute(three, two, 0.5, "normal")


def test_pictures_smaller_than_a_cell_are_not_inpainted() -> None:
    small, found = (
        torch.ones(1, 9, 7, 3),
        "pixels: expected sides of at least 8 pixels, found 7 x 9",
    )
    with pytest.raises(ValueError, match=found):
        VAEEncodeForInpaint().encode(PictureVAE(), small, torch.ones(1, 9, 7))
    with pytest.raises(ValueError, match=found):
        InpaintModelConditioning().encode(COND, COND, small, PictureVAE(), torch.ones(1, 9, 7))
    with pytest.raises(ValueError, match=found):
        InstructPixToPixConditioning.execute(COND, COND, small, PictureVAE())


def test_something_of_a_video_is_left() -> None:
    made = nodes_wan.TrimVideoLatent.execute(latent(1, 16, 5, 2, 2), 4)[0]["samples"]
    assert torch.equal(made, latent(1, 16, 5, 2, 2)["samples"][:, :, 4:])
    with pytest.raises(ValueError, match="trim_amount: expected less than the 5 cells"):
        nodes_wan.TrimVideoLatent.execute(latent(1, 16, 5, 2, 2), 5)
    with pytest.raises(ValueError, match="samples: expected a latent of a video"):
        nodes_wan.TrimVideoLatent.execute(latent(1, 4, 8, 8), 1)


def test_video_and_sound_are_as_many() -> None:
    with pytest.raises(ValueError, match=r"audio_latent: expected .* \(3\), found 1"):
        nodes_lt.LTXVConcatAVLatent.execute(latent(3, 4, 2, 8, 8), latent(1, 8, 16, 4))


def test_planes_of_several_sizes_are_no_picture() -> None:
    with pytest.raises(ValueError, match=r"Y, U, V: .*\(1, 64, 64\), \(1, 64, 64\), \(1, 8, 8\)"):
        nodes_morphology.ImageYUVToRGB.execute(PICTURE, PICTURE, torch.zeros(1, 8, 8, 3))


def test_one_pixel_is_no_video_frame() -> None:
    with pytest.raises(ValueError, match="image: expected sides of at least 2 pixels"):
        nodes_lt.LTXVPreprocess.execute(torch.zeros(1, 1, 9, 3), 35)


def test_autoencoders_of_pictures_know_no_sound() -> None:
    sound = {"waveform": torch.zeros(1, 2, 100), "sample_rate": 44100}
    with pytest.raises(ValueError, match="vae: expected an autoencoder of sound"):
        VAEEncodeAudio.execute(PictureVAE(), sound)
    with pytest.raises(ValueError, match="vae: expected an autoencoder of sound"):
        VAEDecodeAudio.execute(PictureVAE(), latent(1, 4, 8, 8))


@pytest.mark.parametrize("levels", [(120.0, 0.0), (0.0, 0.0), (1.0, 2.0)])
def test_levels_of_a_continuous_model_are_above_zero(levels: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="sigma_min, sigma_max: expected 0 <"):
        nodes_model_advanced.check_levels(levels[1], levels[0])


def test_latents_of_videos_of_other_lengths_are_named() -> None:
    long, short = ({"samples": torch.zeros(1, 4, length, 2, 2)} for length in (6, 3))
    with pytest.raises(ValueError, match="of 6 cells in time, found one of 3"):
        nodes_latent.LatentInterpolate.execute(long, short, 0.5)


def test_a_video_is_sharpened_frame_by_frame() -> None:
    sharpen = nodes_latent.LatentOperationSharpen.execute(2, 1.0, 0.1)[0]
    video = torch.rand(1, 4, 3, 8, 8)
    whole = sharpen(latent=video)
    for frame in range(3):
        torch.testing.assert_close(whole[:, :, frame], sharpen(latent=video[:, :, frame]))


def test_nothing_is_pasted_into_a_sound() -> None:
    sound = {"samples": torch.zeros(2, 64, 22)}
    with pytest.raises(ValueError, match=r"destination: expected a latent of a picture or video"):
        LatentCompositeMasked.execute(sound, sound, 0, 0, False)


@pytest.mark.parametrize("left", [(3, 5, 8), (1, 5, 16)])
def test_sides_of_a_shape_are_seen_alike(left: tuple[int, ...]) -> None:
    seen = [SimpleNamespace(last_hidden_state=torch.zeros(shape)) for shape in ((1, 5, 8), left)]
    with pytest.raises(ValueError, match=r"left: expected as many pictures as front has, .*found"):
        nodes_hunyuan3d.Hunyuan3Dv2ConditioningMultiView.execute(*seen)
    with pytest.raises(ValueError, match="front, left, back, right: expected at least one"):
        nodes_hunyuan3d.Hunyuan3Dv2ConditioningMultiView.execute()
