"""Videos: parts to file to parts, cutting, copying without loss."""

from __future__ import annotations

from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import pytest
import torch

from comfy_api.latest import InputImpl, Types
from comfy_execution.context import interrupt_check

RATE = Fraction(24000, 1001)


def parts(count: int = 24, height: int = 32, width: int = 48, sound: bool = True) -> Any:
    grey = torch.linspace(0.1, 0.9, count)[:, None, None, None].expand(count, height, width, 3)
    audio: Any = None
    if sound:
        samples = int(count / RATE * 44100) + 5000
        tone = torch.sin(torch.arange(samples) / 44100 * 440 * 6.283) * 0.5
        audio = {"waveform": tone.repeat(1, 2, 1), "sample_rate": 44100}
    return Types.VideoComponents(grey.clone(), RATE, audio, {"own": "text"})


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = str(tmp_path / "video.mp4")
    InputImpl.VideoFromComponents(parts()).save_to(path, metadata={"prompt": {"1": "ü"}})
    return path


def test_a_saved_video_comes_back_with_its_sound_and_texts(saved: str) -> None:
    video = InputImpl.VideoFromFile(saved)
    assert video.get_dimensions() == (48, 32)
    assert video.get_frame_count() == 24
    assert video.get_frame_rate() == RATE
    assert video.get_duration() == pytest.approx(24 / float(RATE), abs=0.05)
    assert "mp4" in video.get_container_format()
    read = video.get_components()
    assert read.images.shape == (24, 32, 48, 3)
    assert read.images.dtype == torch.float32
    # H.264 at its default quality keeps flat greys to about one part in a hundred
    assert torch.allclose(read.images, parts().images, atol=0.03)
    assert read.audio is not None
    assert read.audio["waveform"].shape[:2] == (1, 2)
    assert read.audio["waveform"].shape[2] == pytest.approx(24 / RATE * 44100, abs=2048)
    assert read.metadata is not None
    assert read.metadata["own"] == "text"
    assert read.metadata["prompt"] == '{"1": "\\u00fc"}'


def test_an_odd_size_grows_to_the_next_even_one(tmp_path: Path) -> None:
    path = str(tmp_path / "odd.mp4")
    InputImpl.VideoFromComponents(parts(3, 31, 47, sound=False)).save_to(path)
    assert InputImpl.VideoFromFile(path).get_components().images.shape == (3, 32, 48, 3)


def test_a_video_in_memory_is_written_and_read_as_a_stream() -> None:
    stream = BytesIO()
    InputImpl.VideoFromComponents(parts(6, sound=False)).save_to(stream)
    video = InputImpl.VideoFromFile(stream)
    assert video.get_components().images.shape[0] == 6
    assert video.get_components().audio is None
    source = video.get_stream_source()
    assert isinstance(source, BytesIO)
    assert source.tell() == 0


def test_a_cut_file_has_the_pictures_and_the_sound_of_the_part(saved: str) -> None:
    half = InputImpl.VideoFromFile(saved).as_trimmed(start_time=0.5, duration=0.25)
    assert half is not None
    assert half.get_duration() == pytest.approx(0.25)
    read = half.get_components()
    assert read.images.shape[0] == 6
    expected = parts().images[12:18]
    assert torch.allclose(read.images, expected, atol=0.03)
    assert read.audio is not None
    assert read.audio["waveform"].shape[2] == pytest.approx(0.25 * 44100, abs=2)
    tail = InputImpl.VideoFromFile(saved, start_time=-0.25)
    assert tail.get_components().images.shape[0] == pytest.approx(6, abs=1)


def test_cutting_twice_counts_from_the_first_cut(saved: str) -> None:
    once = InputImpl.VideoFromFile(saved).as_trimmed(0.25, 0.5)
    assert once is not None
    twice = once.as_trimmed(0.25)
    assert twice is not None
    assert twice.get_duration() == pytest.approx(0.25)
    assert torch.allclose(twice.get_components().images, parts().images[12:18], atol=0.03)
    assert once.as_trimmed(0.4, 0.2, strict_duration=True) is None
    assert once.as_trimmed(2.0) is None


def test_parts_are_cut_by_pictures() -> None:
    whole = InputImpl.VideoFromComponents(parts())
    cut = whole.as_trimmed(0.5, 0.25)
    assert cut is not None
    read = cut.get_components()
    assert torch.equal(read.images, parts().images[12:18])
    assert read.audio is not None
    assert read.audio["waveform"].shape[2] == pytest.approx(6 / RATE * 44100, abs=1)
    assert whole.as_trimmed(0.9, 0.5, strict_duration=True) is None


def test_an_mp4_is_copied_without_encoding_it_again(saved: str, tmp_path: Path) -> None:
    path = str(tmp_path / "copy.mp4")
    InputImpl.VideoFromFile(saved).save_to(path, metadata={"more": 1})

    def packets(name: str) -> list[bytes]:
        with av.open(name) as container:
            return [bytes(packet) for packet in container.demux(video=0)]

    assert packets(path) == packets(saved)
    texts = InputImpl.VideoFromFile(path).get_components().metadata
    assert texts is not None
    assert (texts["own"], texts["more"]) == ("text", "1")


def test_another_container_is_encoded_anew(tmp_path: Path) -> None:
    source, path = str(tmp_path / "a.mkv"), str(tmp_path / "b.mp4")
    with av.open(source, "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        container.mux(stream.encode())
    InputImpl.VideoFromFile(source).save_to(path)
    video = InputImpl.VideoFromFile(path)
    assert "mp4" in video.get_container_format()
    assert video.get_frame_count() == 5


def test_what_is_no_video_says_so(tmp_path: Path) -> None:
    text = tmp_path / "text.mp4"
    text.write_text("not a video")
    with pytest.raises(ValueError, match=r"cannot read .* as a video"):
        InputImpl.VideoFromFile(str(text)).get_components()
    empty = InputImpl.VideoFromComponents(parts(0, sound=False))
    with pytest.raises(ValueError, match="video of 0 pictures"):
        empty.save_to(str(tmp_path / "none.mp4"))
    with pytest.raises(ValueError, match="'webm' is not a valid VideoContainer"):
        empty.save_to(str(tmp_path / "x"), format="webm")  # type: ignore[arg-type]


def test_3d_files_and_vector_pictures_keep_their_content(tmp_path: Path) -> None:
    model = Types.File3D(BytesIO(b"glTF"), ".GLB")
    assert (model.format, model.is_disk_backed) == ("glb", False)
    path = model.save_to(str(tmp_path / "new" / "m.glb"))
    assert Types.File3D(path).get_data().read() == b"glTF"
    assert Types.File3D(path).format == "glb"
    both = Types.SVG.combine_all([Types.SVG([BytesIO(b"1")]), Types.SVG([BytesIO(b"2")])])
    assert [item.read() for item in both.data] == [b"1", b"2"]
    with pytest.raises(TypeError, match=r"\['str'\]; expected a list of BytesIO"):
        Types.SVG(["x"])  # type: ignore[list-item]


def test_an_interrupted_video_leaves_no_file(tmp_path: Path) -> None:
    class Stopped(BaseException):
        pass

    seen: list[int] = []

    def stop_at_third() -> None:
        seen.append(1)
        if len(seen) == 3:
            raise Stopped

    token = interrupt_check.set(stop_at_third)
    try:
        with pytest.raises(Stopped):
            InputImpl.VideoFromComponents(parts()).save_to(str(tmp_path / "v.mp4"))
    finally:
        interrupt_check.reset(token)
    assert list(tmp_path.iterdir()) == []
