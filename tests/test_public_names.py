"""Every name that custom-node packs import exists, or is known not to exist yet.

The record was made from 129 public packs; `python -m tools.public_names` prints the coverage, and
with `--update` rewrites the list of known gaps, which should only get shorter.
"""

from __future__ import annotations

import pytest

from tools.public_names import gaps_of, known_gaps, make_server, recorded_names

NAMES = recorded_names()
KNOWN = known_gaps()


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    make_server()


@pytest.mark.parametrize("module", sorted(NAMES))
def test_a_module_offers_what_packs_use_of_it(module: str) -> None:
    gaps = gaps_of(module, NAMES[module])
    unexpected = [gap for gap in gaps if gap.name not in KNOWN.get(module, ())]
    assert unexpected == []
    if gaps:
        total = max(1, len(NAMES[module]))
        reasons = "; ".join(f"{gap.name or module}: {gap.reason}" for gap in gaps[:3])
        pytest.skip(f"{len(gaps)} of {total} names of {module} are missing ({reasons} ...)")


def test_known_gaps_are_names_of_the_record() -> None:
    unknown = {
        f"{module}.{name}"
        for module, names in KNOWN.items()
        for name in names
        if name and name not in NAMES.get(module, {})
    }
    assert unknown == set()
