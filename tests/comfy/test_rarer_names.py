"""Names that few packs use, seen the way those packs use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import comfy.sampler_helpers
import comfy.sd
import comfy.sd1_clip
from comfy.sampling.masks import prepare_mask
from comfy_extras import nodes_gits
from tests.comfy.test_text_loading import encoder, t5


@pytest.mark.parametrize("width", [768, 1024])
def test_an_embedding_is_read_from_a_zipped_file_without_its_pickle(
    width: int, tmp_path: Path
) -> None:
    rows = torch.arange(2.0 * width).view(2, width)
    path = tmp_path / "style.pt"
    torch.save({"string_to_token": {"*": torch.tensor(265)}, "string_to_param": {"*": rows}}, path)
    assert torch.equal(comfy.sd1_clip.safe_load_embed_zip(str(path)), rows)
    torch.save(torch.ones(3), path)
    with pytest.raises(ValueError, match=r"style\.pt holds no embedding: expected"):
        comfy.sd1_clip.safe_load_embed_zip(str(path))


def test_the_type_of_t5_is_found_among_state_dicts() -> None:
    half = {key: value.bfloat16() for key, value in t5(4096, True).items()}
    assert comfy.sd.t5xxl_detect([encoder(), half]) == {"dtype_t5": torch.bfloat16}
    assert comfy.sd.t5xxl_detect([encoder()]) == {}


def test_a_pack_replaces_how_masks_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fitted(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, 0.25)

    monkeypatch.setattr(comfy.sampler_helpers.comfy.utils, "reshape_mask", fitted)
    made = prepare_mask(torch.ones(1, 8, 8), (1, 4, 2, 2), torch.device("cpu"))
    assert torch.equal(made, torch.full((1, 4, 2, 2), 0.25))


def test_packs_read_and_add_levels_of_gits(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = nodes_gits.NOISE_LEVELS
    made = nodes_gits.GITSScheduler.get_sigmas(1.2, 5, 1.0)[0]
    wanted = torch.tensor([*levels[1.2][5 - 2][:-1], 0.0])
    torch.testing.assert_close(made, wanted)
    assert [len(row) for row in levels[1.2]] == list(range(3, 22))
    rows = [[9.0 - n for n in range(count + 1)] for count in range(2, 21)]
    monkeypatch.setitem(levels, 2.0, rows)
    assert nodes_gits.GITSScheduler.get_sigmas(2.0, 3, 1.0)[0].tolist() == [9, 8, 7, 0]
