"""LTX-2: its network beside another implementation, and small files of videos with sound."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy import loading
from comfy.devices import residency
from comfy.families import unsupported
from comfy.families.family import BrokenModelError
from comfy.families.ltxav import read_ltxav_config
from comfy.ldm.lightricks.av_model import LTXAVModel
from comfy.nested_tensor import NestedTensor
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.patcher import ModelPatcher
from comfy.sampling.guidance import CFGGuider
from comfy.saving import save_checkpoint
from comfy_extras import nodes_custom_sampler as custom
from comfy_extras.nodes_lt_guidance import Guider_LTXVDualCFG
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families import key_shapes
from tests.comfy.families.small_files import PREFIX, prefixed
from tests.comfy.families.test_transformers import random_like
from tests.comfy.patching.test_packs_sampling import close
from tests.support.accelerator import assert_untouched, bytes_of, snapshot

TEXT = 24
SIZES: dict[str, Any] = {
    "in_channels": 128, "audio_in_channels": 16, "cross_attention_dim": 128,
    "audio_cross_attention_dim": 64, "attention_head_dim": 4, "audio_attention_head_dim": 2,
    "caption_channels": TEXT, "num_layers": 2,
}  # fmt: skip
VIDEO, SOUND = (1, 128, 3, 2, 3), (1, 4, 7, 4)
# Of LTX-2.3: gates, texts that the time modulates and that come as wide as they are read.
LATER = {
    **SIZES, "caption_channels": None, "apply_gated_attention": True, "cross_attention_adaln": True,
}  # fmt: skip
LATER_TEXT = SIZES["cross_attention_dim"] + SIZES["audio_cross_attention_dim"]
TOLD = {"rope_type": "interleaved", "av_ca_timestep_scale_multiplier": 500.0}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def varied(module: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    """Weights of which no two are alike, biases and norms too."""
    made = random_like(module, seed)
    others = {k: v + 0.2 * noise(*v.shape, seed=n) for n, (k, v) in enumerate(made.items())}
    return {k: v if v.ndim > 1 else others[k] for k, v in made.items()}


def load(folder: Path, sizes: dict[str, Any] = SIZES, **header: Any) -> Any:
    weights = prefixed(varied(LTXAVModel(**sizes), 4), PREFIX)
    told = {"config": json.dumps({"transformer": header})} if header else None
    path = folder / "ltx2.safetensors"
    save_file({k: v.contiguous() for k, v in weights.items()}, path, metadata=told)
    return loading.load_diffusion_model(str(path))


def sampled(
    model: Any,
    mask: Any = None,
    sound: Tensor | None = None,
    cfg: float = 1.0,
    text: int = TEXT,
    **options: Any,
) -> list[Tensor]:
    """Two steps from latents of ones: video and sound."""
    positive = [[noise(1, 6, 2 * text), dict(options)]]
    negative = [[noise(1, 6, 2 * text, seed=4), dict(options)]]
    parts = [torch.ones(VIDEO), torch.ones(SOUND) if sound is None else sound]
    latent: dict[str, Any] = {"samples": NestedTensor(parts)}
    if mask is not None:
        latent["noise_mask"] = mask
    made = common_ksampler(model, 3, 2, cfg, "euler", "simple", positive, negative, latent)
    both: list[Tensor] = made[0]["samples"].unbind()
    assert all(part.isfinite().all() for part in both)
    return both


@pytest.mark.parametrize(
    ("sizes", "text", "kind", "video", "sound"),
    [
        (SIZES, 2 * TEXT, "split", [2.9972, 2.7108, 4.4377], [-1.2194, -1.3171, 0.2827, 1.3549]),
        (
            SIZES, 2 * TEXT, "interleaved",
            [2.9939, 2.7856, 4.5283], [-1.2187, -1.3281, 0.2784, 1.3621],
        ),
        (LATER, LATER_TEXT, "split", [3.566, 4.274, 4.6988], [2.0775, 1.5284, 2.1213, 1.8162]),
        (
            LATER, LATER_TEXT, "interleaved",
            [3.4642, 4.2024, 4.6169], [2.0342, 1.5061, 2.1005, 1.7907],
        ),
    ],
    ids=["2 split", "2 interleaved", "2.3 split", "2.3 interleaved"],
)  # fmt: skip
def test_the_network_gives_what_another_implementation_gives(
    sizes: dict[str, Any], text: int, kind: str, video: list[float], sound: list[float]
) -> None:
    """The implementation of the diffusers library, on the same weights; each cell has its time, and
    the step the latest of them.
    """
    network = LTXAVModel(**sizes, rope_type=kind).eval()
    network.load_state_dict(varied(network, 4))
    times = torch.linspace(0.1, 0.9, 18)[None, :, None], torch.linspace(0.8, 0.2, 7)[None]
    context = noise(1, 5, text, seed=5)
    made = network([noise(*VIDEO), noise(*SOUND)], times, context, frame_rate=24.0)
    assert isinstance(made, list)
    torch.testing.assert_close(made[0][0, 7, :, 1, 2], torch.tensor(video), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(made[1][0, 2, :4, 1], torch.tensor(sound), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("sizes", "name"), [(SIZES, "LTX-2"), (LATER, "LTX-2.3")])
def test_sizes_are_read_from_the_weights_and_a_hole_is_named(
    sizes: dict[str, Any], name: str
) -> None:
    weights = varied(LTXAVModel(**sizes), 4)
    config = read_ltxav_config(weights)
    assert config is not None
    assert {"in_channels": 128, **config} == {"image_model": "ltxav", **sizes}
    del weights["audio_patchify_proj.weight"]
    with pytest.raises(BrokenModelError, match=f"layout of {name}, but audio_patchify_proj"):
        read_ltxav_config(weights)


def test_a_version_that_is_not_built_in_is_named() -> None:
    weights = varied(LTXAVModel(**LATER), 4)
    later = {key: value for key, value in weights.items() if "prompt_adaln" not in key}
    assert read_ltxav_config(later) is None
    assert unsupported.name_of(later, "") == "LTX-2.5, video with sound, or a later version"


def test_heads_are_counted_by_their_gates() -> None:
    sizes = {"num_attention_heads": 16, "audio_num_attention_heads": 8}
    heads = {**sizes, "attention_head_dim": 8, "audio_attention_head_dim": 8}
    config = read_ltxav_config(varied(LTXAVModel(**{**LATER, **heads}), 4))
    assert config is not None
    assert {name: config[name] for name in heads} == heads


def test_a_text_that_times_modulate_is_as_wide_as_its_stream() -> None:
    with pytest.raises(ValueError, match="width 128 modulates its text, but reads one 96 wide"):
        LTXAVModel(**{**LATER, "cross_attention_dim": 96})


def test_published_networks_have_a_place_for_every_key(golden_folder: Path) -> None:
    recorded = key_shapes.network(golden_folder, "LTXAV (LTX-2)")
    own = LTXAVModel(device="meta").state_dict()
    assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in recorded.items()}


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("adaln_single.linear.weight", (9 * 4096, 4096)),
        ("audio_prompt_adaln_single.linear.weight", (2 * 2048, 2048)),
        ("transformer_blocks.47.scale_shift_table", (9, 4096)),
        ("transformer_blocks.47.audio_prompt_scale_shift_table", (2, 2048)),
        ("transformer_blocks.47.audio_attn2.to_gate_logits.weight", (32, 2048)),
        ("transformer_blocks.47.audio_to_video_attn.to_gate_logits.weight", (32, 4096)),
        ("transformer_blocks.47.video_to_audio_attn.to_gate_logits.bias", (32,)),
    ],
)
def test_the_later_network_has_a_place_for_its_keys(key: str, shape: tuple[int, ...]) -> None:
    kind = {"apply_gated_attention": True, "cross_attention_adaln": True}
    network = LTXAVModel(caption_channels=None, **kind, device="meta")
    assert network.state_dict()[key].shape == shape


def test_a_given_cell_does_not_change_how_texts_and_the_other_stream_are_read() -> None:
    """They are read at the time of the step, which is that of the cells that are made."""
    network = LTXAVModel(**LATER)
    network.load_state_dict(varied(network, 4))
    latents, text = [noise(*VIDEO), noise(*SOUND)], noise(1, 5, LATER_TEXT)

    def heard(first: float) -> Tensor:
        """What the sound makes of the video without seeing its cells."""
        video = torch.full((1, 18, 1), 0.5)
        video[:, 0] = first
        told = {"v2a_cross_attn": False, "run_vx": False}
        made = network(latents, (video, torch.full((1, 7), 0.5)), text, transformer_options=told)
        return made[1]

    assert torch.equal(heard(0.0), heard(0.5))
    options = {"a2v_cross_attn": False, "v2a_cross_attn": False}
    both = torch.full((1, 18, 1), 0.5), torch.full((1, 7), 0.5)
    alike = network(latents, both, text, transformer_options=options)
    other = network(latents, (both[0], both[1] / 2), text, transformer_options=options)
    assert torch.equal(alike[0], other[0])  # its text is read at its own time
    together = [network(latents, one, text)[0] for one in (both, (both[0], both[1] / 2))]
    assert not torch.allclose(*together)


@pytest.mark.parametrize(("sizes", "text"), [(SIZES, TEXT), (LATER, LATER_TEXT // 2)])
def test_video_and_sound_are_made_together_and_survive_saving(
    sizes: dict[str, Any], text: int, tmp_path: Path
) -> None:
    model = load(tmp_path, sizes, **TOLD)
    assert type(model.model.model_config).__name__ == "LTXAV"
    video, sound = sampled(model, text=text)
    assert (video.shape, sound.shape) == (VIDEO, SOUND)
    without = load(tmp_path, sizes)
    assert not torch.equal(sampled(without, text=text)[0], video)  # as the header tells
    path = str(tmp_path / "again.safetensors")
    save_checkpoint(path, model)
    again = loading.load_diffusion_model(path)
    assert all(torch.equal(a, b) for a, b in zip(sampled(again, text=text), (video, sound)))


def test_each_looks_at_the_other_and_at_its_own_text(tmp_path: Path) -> None:
    model = load(tmp_path)
    video, _ = sampled(model)
    other = sampled(model, sound=torch.zeros(SOUND))
    assert not torch.allclose(other[0], video)
    network = model.model.diffusion_model
    latents = [noise(*VIDEO), noise(*SOUND)]
    time, text = torch.tensor([0.5]), noise(1, 5, 2 * TEXT)
    muted = text.clone()
    muted[..., TEXT:] = 0

    def made(context: Tensor, gates: float) -> Any:
        network.load_state_dict(
            {
                k: v * gates if "ca_a2v" in k or "ca_v2a" in k or "a2v_ca" in k else v
                for k, v in network.state_dict().items()
            }
        )
        return network(latents, time, context)

    with_other, without = made(text, 1.0), made(text, 0.0)
    assert not torch.allclose(with_other[0], without[0])
    told = made(muted, 1.0)  # gates are shut: each has its own text alone
    assert torch.equal(told[0], without[0])
    assert not torch.allclose(told[1], without[1])


@pytest.mark.parametrize(("sizes", "text"), [(SIZES, 2 * TEXT), (LATER, LATER_TEXT)])
def test_pictures_and_sound_are_guided_by_scales_of_their_own(
    sizes: dict[str, Any], text: int, tmp_path: Path
) -> None:
    model = load(tmp_path, sizes)
    texts = [[[noise(1, 6, text, seed=seed), {}]] for seed in (3, 4)]

    def member(guider: Any, number: int) -> Tensor:
        """Of one step from noise, which ends at the clean estimate."""
        guider.set_conds(*texts)
        output = custom.SamplerCustomAdvanced.execute(
            noise=custom.RandomNoise.execute(3)[0],
            guider=guider,
            sampler=custom.KSamplerSelect.execute("euler")[0],
            sigmas=torch.tensor([0.9, 0.0]),
            latent_image={"samples": NestedTensor([torch.zeros(VIDEO), torch.zeros(SOUND)])},
        )
        made: Tensor = output[0]["samples"].unbind()[number]
        return made

    both = Guider_LTXVDualCFG(model)
    both.set_cfg(3.0, 7.0)
    for number, cfg in enumerate((3.0, 7.0)):
        usual = CFGGuider(model)
        usual.set_cfg(cfg)
        torch.testing.assert_close(member(both, number), member(usual, number))
        assert not torch.allclose(member(both, 1 - number), member(usual, 1 - number))


def test_a_batch_and_guidance_give_the_same(tmp_path: Path) -> None:
    model = load(tmp_path)
    network = model.model.diffusion_model
    latents = [noise(2, *VIDEO[1:]), noise(2, *SOUND[1:])]
    text, times = noise(2, 5, 2 * TEXT), torch.tensor([0.2, 0.7])
    both = network(latents, times, text)
    one = network([part[1:] for part in latents], times[1:], text[1:])
    assert all(close(a[1:], b) for a, b in zip(both, one))
    assert not torch.equal(sampled(model, cfg=3.0)[0], sampled(model)[0])


def test_given_frames_and_sounds_stay_as_they_are(tmp_path: Path) -> None:
    model = load(tmp_path)
    frames, spectra = torch.ones(1, 1, 3, 2, 3), torch.ones(1, 1, 7, 4)
    frames[:, :, 0], spectra[:, :, :4] = 0, 0
    video, sound = sampled(model, NestedTensor([frames, spectra]))
    torch.testing.assert_close(video[:, :, 0], torch.ones(1, 128, 2, 3))
    torch.testing.assert_close(sound[:, :, :4], torch.ones(1, 4, 4, 4))
    for part in (video[:, :, 1], sound[:, :, 4]):
        assert not torch.allclose(part, torch.ones(part.shape))
    # The network is told that they are given.
    everything = NestedTensor([torch.ones_like(frames), torch.ones_like(spectra)])
    assert not torch.allclose(sampled(model, everything)[0][:, :, 1], video[:, :, 1])


def test_a_video_alone_has_no_sound_to_look_at(tmp_path: Path) -> None:
    model = load(tmp_path)
    cond = [[noise(1, 6, 2 * TEXT), {}]]
    latent = {"samples": torch.ones(VIDEO)}
    made = common_ksampler(model, 3, 2, 1.0, "euler", "simple", cond, cond, latent)
    assert made[0]["samples"].isfinite().all()
    assert made[0]["samples"].shape == VIDEO


def test_places_of_guides_and_the_rate_of_frames_count(tmp_path: Path) -> None:
    model = load(tmp_path)
    video, _ = sampled(model)
    assert not torch.equal(sampled(model, frame_rate=5)[0], video)
    assert not torch.equal(sampled(model, keyframe_idxs=torch.zeros(1, 3, 6, 2))[0], video)


def test_blocks_can_be_replaced(tmp_path: Path) -> None:
    model = load(tmp_path)
    want = sampled(model)
    seen: list[Any] = []

    def same(args: dict[str, Any], told: dict[str, Any]) -> Any:
        seen.append([part.shape for part in args["img"]])
        return told["original_block"](args)

    view = model.clone()
    view.set_model_patch_replace(same, "dit", "double_block", 1)
    assert all(torch.equal(a, b) for a, b in zip(sampled(view), want))
    assert seen == [[(1, 18, 128), (1, 7, 64)]] * 2


@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
def test_a_small_device_gives_the_same(
    kind: type[ModelPatcher], accelerator: Any, tmp_path: Path
) -> None:
    found = load(tmp_path)
    before = snapshot(found.model)

    def made() -> list[Tensor]:
        residency.unload_all_models()
        view = kind(found.model, torch.device(f"{accelerator.NAME}:0"), found.offload_device)
        return sampled(view)

    want = made()
    peak = torch.accelerator.max_memory_allocated(0)
    accelerator.set_capacity(int(peak - 0.4 * bytes_of(found.model)), 0)
    assert all(close(a, b) for a, b in zip(made(), want))
    residency.unload_all_models()
    assert_untouched(found.model, before)


def test_memory_counts_both_latents_whether_packed_or_not(tmp_path: Path) -> None:
    model = load(tmp_path).model
    assert model.memory_required(VIDEO) == model.memory_required((1, 1, 128 * 18)) > 0
    assert model.memory_required((1, 1, 2 * 128 * 18)) == 2 * model.memory_required(VIDEO)


def test_text_of_another_model_is_refused(tmp_path: Path) -> None:
    model = load(tmp_path)
    cond = [[noise(1, 6, TEXT), {}]]
    latent = {"samples": torch.ones(VIDEO)}
    with pytest.raises(ValueError, match="48"):
        common_ksampler(model, 3, 2, 1.0, "euler", "simple", cond, cond, latent)


MISFITS = {
    "three parts": ([VIDEO, SOUND, SOUND], "3 parts"),
    "the sound first": ([SOUND, VIDEO], r"\(1, 4, 7, 4\), \(1, 128, 3, 2, 3\)"),
    "a video of other channels": ([(1, 16, 3, 2, 3), SOUND], r"a video \[batch, 128, "),
    "a sound of other bands": ([VIDEO, (1, 4, 7, 5)], "of 16 channels x bands"),
    "two videos": ([VIDEO, VIDEO], "2 parts"),
    "batches that differ": ([(2, *VIDEO[1:]), SOUND], "of one batch, found shapes .*batch_size"),
    "an empty sound": ([VIDEO, (1, 4, 0, 4)], "holds one cell at least"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_parts_that_are_no_video_with_sound_are_refused_with_their_shapes(
    case: str, tmp_path: Path
) -> None:
    shapes, reason = MISFITS[case]
    model = load(tmp_path)
    latent = {"samples": NestedTensor([noise(*shape) for shape in shapes])}
    text = [[noise(1, 3, 2 * TEXT), {}]]
    with pytest.raises(ValueError, match=reason):
        common_ksampler(model, 3, 2, 2.0, "euler", "simple", text, text, latent)
