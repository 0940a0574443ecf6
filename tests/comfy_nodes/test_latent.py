"""Latent nodes keep what travels along and count batches right."""

from __future__ import annotations

import asyncio

import pytest
import torch

import nodes
from comfy_extras import nodes_latent, nodes_mask, nodes_rebatch
from comfy_nodes.latent_basics import noise_mask_of


def test_an_empty_latent_has_cells_of_eight_pixels() -> None:
    latent = nodes.EmptyLatentImage().generate(200, 96, 3)[0]
    assert latent["samples"].shape == (3, 4, 12, 25)
    assert latent["samples"].abs().sum() == 0


def test_a_side_of_zero_follows_the_proportions() -> None:
    latent = {"samples": torch.zeros(1, 4, 16, 32)}
    up = nodes.LatentUpscale()
    assert up.upscale(latent, "area", 512, 0, "disabled")[0]["samples"].shape[-2:] == (32, 64)
    assert up.upscale(latent, "area", 0, 256, "disabled")[0]["samples"].shape[-2:] == (32, 64)
    assert up.upscale(latent, "area", 0, 0, "disabled")[0] is latent


def test_taking_from_a_batch_keeps_mask_and_noise_indices() -> None:
    latent = {
        "samples": torch.arange(4.0).reshape(4, 1, 1, 1),
        "noise_mask": torch.arange(4.0).reshape(4, 1, 1, 1),
    }
    taken = nodes.LatentFromBatch().frombatch(latent, 2, 5)[0]
    assert taken["samples"].flatten().tolist() == [2.0, 3.0]
    assert taken["noise_mask"].flatten().tolist() == [2.0, 3.0]
    assert taken["batch_index"] == [2, 3]
    again = nodes.LatentFromBatch().frombatch(taken, 1, 1)[0]
    assert again["batch_index"] == [3]


def test_repeating_gives_each_repetition_noise_of_its_own() -> None:
    latent = {
        "samples": torch.arange(2.0).reshape(2, 1, 1, 1),
        "batch_index": [4, 7],
        "noise_mask": torch.ones(2, 1, 8, 8),
    }
    repeated = nodes.RepeatLatentBatch().repeat(latent, 2)[0]
    assert repeated["samples"].flatten().tolist() == [0.0, 1.0, 0.0, 1.0]
    assert repeated["batch_index"] == [4, 7, 8, 11]
    assert repeated["noise_mask"].shape[0] == 4


def test_pasting_outside_changes_nothing() -> None:
    target = {"samples": torch.zeros(1, 4, 8, 8)}
    source = {"samples": torch.ones(1, 4, 4, 4)}
    pasted = nodes.LatentComposite().composite(target, source, 64, 0)[0]
    assert pasted["samples"].abs().sum() == 0


def test_pasting_fades_at_edges_inside_the_picture_only() -> None:
    target = {"samples": torch.zeros(1, 4, 8, 8)}
    source = {"samples": torch.ones(1, 4, 4, 8)}
    pasted = nodes.LatentComposite().composite(target, source, 0, 16, feather=16)[0]
    column = pasted["samples"][0, 0, :, 0].tolist()
    assert column == [0.0, 0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert pasted["samples"][0, 0, 3].tolist() == [1.0] * 8


def test_a_noise_mask_is_a_batch_of_one_channel() -> None:
    latent = {"samples": torch.zeros(1, 4, 8, 8)}
    masked = nodes.SetLatentNoiseMask().set_mask(latent, torch.ones(64, 64))[0]
    assert masked["noise_mask"].shape == (1, 1, 64, 64)
    assert "noise_mask" not in latent


def test_masked_pasting_clips_at_every_edge() -> None:
    for x, y in ((-2, -2), (6, 6), (-2, 6), (20, 0)):
        target, source = torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 4, 4)
        pasted = nodes_mask.composite(target, source, x, y, multiplier=1)
        expected = torch.zeros(8, 8)
        expected[max(0, y) : max(0, y + 4), max(0, x) : max(0, x + 4)] = 1
        assert torch.equal(pasted[0, 0], expected)


@pytest.mark.parametrize(
    ("node", "expected"),
    [(nodes_latent.LatentAdd, 5.0), (nodes_latent.LatentSubtract, -1.0)],
)
def test_arithmetic_fits_the_second_latent_to_the_first(node: type, expected: float) -> None:
    first = {"samples": torch.full((2, 4, 8, 8), 2.0)}
    second = {"samples": torch.full((1, 4, 4, 4), 3.0)}
    assert torch.allclose(node.execute(first, second)[0]["samples"], torch.tensor(expected))


def test_interpolation_of_a_latent_with_itself_changes_nothing() -> None:
    latent = {"samples": torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))}
    mixed = nodes_latent.LatentInterpolate.execute(latent, latent, 0.3)[0]["samples"]
    torch.testing.assert_close(mixed, latent["samples"])


def test_cutting_to_a_batch_loses_only_the_rest() -> None:
    latent = {"samples": torch.arange(10.0).reshape(1, 1, 1, 10)}
    cut = nodes_latent.LatentCutToBatch.execute(latent, "x", 4)[0]["samples"]
    assert cut.flatten(1).tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]


def test_concatenation_on_either_side() -> None:
    first, second = {"samples": torch.zeros(1, 1, 1, 2)}, {"samples": torch.ones(1, 1, 1, 1)}
    right = nodes_latent.LatentConcat.execute(first, second, "x")[0]["samples"]
    left = nodes_latent.LatentConcat.execute(first, second, "-x")[0]["samples"]
    assert right.flatten().tolist() == [0.0, 0.0, 1.0]
    assert left.flatten().tolist() == [1.0, 0.0, 0.0]


def test_rebatching_starts_a_new_batch_where_the_size_changes() -> None:
    small, large = torch.zeros(3, 4, 8, 8), torch.zeros(2, 4, 16, 8)
    made = nodes_rebatch.LatentRebatch.execute([{"samples": small}, {"samples": large}], [2])[0]
    assert [tuple(latent["samples"].shape) for latent in made] == [
        (2, 4, 8, 8),
        (1, 4, 8, 8),
        (2, 4, 16, 8),
    ]
    assert [latent["batch_index"] for latent in made] == [[0, 1], [2], [3, 4]]


def test_rebatched_latents_have_a_noise_mask_only_where_something_is_kept() -> None:
    plain, masked = {"samples": torch.zeros(3, 4, 8, 8)}, {"samples": torch.zeros(1, 4, 8, 8)}
    masked["noise_mask"] = torch.zeros(1, 1, 64, 64)
    made = nodes_rebatch.LatentRebatch.execute([plain, masked], [2])[0]
    assert ["noise_mask" in latent for latent in made] == [False, True]
    assert made[1]["noise_mask"].mean() == 0.5


RAMP = torch.arange(64.0).reshape(8, 8) / 64
NOISE_MASKS: dict[str, tuple[torch.Tensor, tuple[int, ...], list[int]]] = {
    # given for three latents -> shape for one, which of the given ones each latent has
    "[H, W]": (RAMP, (1, 1, 8, 8), [0, 0, 0]),
    "[1, H, W]": (RAMP[None], (1, 1, 8, 8), [0, 0, 0]),
    "[B, H, W]": (torch.stack([RAMP * k for k in range(3)]), (1, 1, 8, 8), [0, 1, 2]),
    "[B, 1, H, W]": (torch.stack([RAMP * k for k in range(3)])[:, None], (1, 1, 8, 8), [0, 1, 2]),
    "fewer": (torch.stack([RAMP * k for k in range(2)]), (1, 1, 8, 8), [0, 1, 0]),
    "more": (torch.stack([RAMP * k for k in range(5)]), (1, 1, 8, 8), [0, 1, 2]),
    "yes or no": (RAMP[None] > 0.5, (1, 1, 8, 8), [0, 0, 0]),
    "whole numbers": ((RAMP[None] > 0.5).int(), (1, 1, 8, 8), [0, 0, 0]),
}


@pytest.mark.parametrize("shape", [(3, 4, 8, 8), (3, 4, 2, 8, 8)])
@pytest.mark.parametrize("kind", NOISE_MASKS)
def test_noise_masks_of_every_shape_follow_their_latents(kind: str, shape: tuple[int, ...]) -> None:
    mask, one, places = NOISE_MASKS[kind]
    flat = mask.float().reshape(-1, *mask.shape[-2:])
    expected = [flat[place].reshape(one) for place in places]
    if len(shape) == 5:  # masks of the moments, the same for each video
        expected = [flat[None, None]] * 3
    latent = {"samples": torch.rand(shape), "noise_mask": mask}
    taken = nodes.LatentFromBatch().frombatch(latent, 1, 2)[0]["noise_mask"]
    for number, wanted in enumerate(expected[1:]):
        assert torch.equal(taken[number % len(taken)][None], wanted)
    repeated = nodes.RepeatLatentBatch().repeat(latent, 2)[0]
    for number, wanted in enumerate([*expected, *expected]):
        given = noise_mask_of(repeated, "samples")
        assert given is not None
        assert torch.equal(given[number % len(given)][None], wanted)
    (whole,) = nodes_rebatch.LatentRebatch.execute([latent], [9])[0]
    torch.testing.assert_close(whole["noise_mask"], torch.cat(expected))


def test_what_is_no_noise_mask_is_refused_with_its_input() -> None:
    for bad in ("x", torch.rand(8), torch.rand(1, 0, 8)):
        latent = {"samples": torch.zeros(2, 4, 8, 8), "noise_mask": bad}
        with pytest.raises(ValueError, match=r"samples: expected a latent whose noise_mask is"):
            nodes.LatentFromBatch().frombatch(latent, 0, 1)
        with pytest.raises(ValueError, match=r"latents: expected a latent whose noise_mask is"):
            nodes_rebatch.LatentRebatch.execute([latent], [9])


def test_masked_and_plain_videos_and_sounds_are_rebatched() -> None:
    for shape, mask in (((2, 4, 3, 8, 8), (3, 32, 32)), ((2, 4, 16), (1, 1, 16))):
        masked = {"samples": torch.rand(shape), "noise_mask": torch.zeros(mask)}
        made = nodes_rebatch.LatentRebatch.execute([masked, {"samples": torch.rand(shape)}], [3])[0]
        assert [tuple(latent["samples"].shape) for latent in made] == [
            (3, *shape[1:]),
            (1, *shape[1:]),
        ]
        assert [float(item.mean()) for item in made[0]["noise_mask"]] == [0.0, 0.0, 1.0]


def test_operations_are_functions_of_a_latent() -> None:
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1)) * 10
    tonemap = nodes_latent.LatentOperationTonemapReinhard.execute(1.0)[0]
    assert tonemap(latent=latent).norm() < latent.norm()
    sharpen = nodes_latent.LatentOperationSharpen.execute(3, 1.0, 0.0)[0]
    torch.testing.assert_close(sharpen(latent=latent), latent)  # alpha 0 sharpens nothing


def test_every_extra_node_can_be_listed() -> None:
    assert asyncio.run(nodes.init_builtin_extra_nodes()) == []
