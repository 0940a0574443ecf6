"""Regular expressions of the text nodes: those of `re`, in bounded time, cancellable."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from comfy.interrupt import InterruptProcessingException, interrupt_current_processing
from comfy.sampling import sigma_edits
from comfy_extras import nodes_slg, nodes_string, regex_child, regular_expressions
from comfy_extras.images import saving
from tests.support.waiting import PATIENCE_S

FLAGS = {"case_insensitive": False, "multiline": False, "dotall": False}
ENDLESS = [r"(a+)+$", r"(a|a)*$", r"(a?){40}a{40}$", r"(.*)*,$", r"^(\w+\s?)*$", r"(?:a*)*b"]
TEXT = "a" * 40 + "!"
PATTERNS = [
    "b", "^a.*b$", r"\d+", r"(\w)=(\d)", r"(?P<key>\w+)=(?P<value>\d+)", r"(?i:B)|c", "a{2,3}",
    "a{e}", r"[[:alpha:]]+", r"\bna\u00efve\b", "\u00df", r"\w+", r"\s", "(x)?y", r"(a)\1", "",
    r"(?<=a)b", r"(?!a).", "[^a-c]+", "k",
]  # fmt: skip
TEXTS = [
    "", "aab\nab", "w=3 h=44", "a{e} :alpha:", "na\u00efve STRASSE stra\u00dfe",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u00b2", "y xy\x1cB",
    "aa\r\nAA\u2028 \u212a \u017f \ud800",
]  # fmt: skip


def call(node: str, pattern: str, string: str = TEXT) -> Any:
    """A node's output."""
    given = {"string": string, "regex_pattern": pattern, **FLAGS}
    if node == "RegexExtract":
        given |= {"mode": "All Matches", "group_index": 1}
    if node == "RegexReplace":
        given |= {"replace": "#"}
    return getattr(nodes_string, node).execute(**given)[0]


def of_re(pattern: str, string: str, flags: int) -> list[Any]:
    """What `re` finds, joins and replaces."""
    found = [m if isinstance(m, str) else m[0] for m in re.findall(pattern, string, flags)]
    return [
        re.search(pattern, string, flags) is not None,
        "\n".join(found),
        re.sub(pattern, r"<\g<0>>", string, count=2, flags=flags),
    ]


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize("flags", [0, re.I, re.M | re.S, re.I | re.M | re.S])
def test_a_search_finds_what_re_finds(flags: int) -> None:
    tasks: list[dict[str, Any]] = [
        {"task": "match"},
        {"task": "extract", "mode": "All Matches", "group": 1},
        {"task": "replace", "replace": r"<\g<0>>", "count": 2},
    ]
    for pattern in PATTERNS:
        for string in TEXTS:
            ours = [
                regex_child.answer(
                    {"pattern": pattern, "string": string, "flags": int(flags), **task}
                )["result"]
                for task in tasks
            ]
            assert ours == of_re(pattern, string, flags), (pattern, string)


@pytest.mark.parametrize("string", TEXTS)
def test_a_process_of_its_own_gives_the_same_answer(string: str) -> None:
    pattern = r"(\w|\s)+"
    assert not regular_expressions.is_quick(pattern, string)
    ours = [call(node, pattern, string) for node in ("RegexMatch", "RegexExtract")]
    assert ours == of_re(pattern, string, 0)[:2]


@pytest.mark.parametrize("node", ["RegexMatch", "RegexExtract", "RegexReplace"])
@pytest.mark.parametrize("pattern", ENDLESS)
def test_a_search_without_end_is_ended_and_its_pattern_named(
    node: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regular_expressions, "TIME_LIMIT_S", 0.05)
    with pytest.raises(ValueError, match=r"took more than 0\.05 s") as caught:
        call(node, pattern)
    assert repr(pattern) in str(caught.value)


def test_other_threads_go_on_and_the_search_can_be_cancelled() -> None:
    ended: list[BaseException] = []

    def search() -> None:
        try:
            call("RegexMatch", "(a+)+$")
        except InterruptProcessingException as error:
            ended.append(error)

    worker = threading.Thread(target=search)
    worker.start()
    begin = time.monotonic()
    while time.monotonic() - begin < 0.2:
        time.sleep(0.01)  # would not come back if the search held the interpreter's lock
    interrupt_current_processing()
    worker.join(PATIENCE_S)
    interrupt_current_processing(False)
    assert not worker.is_alive()
    assert ended


QUICK: dict[str, Callable[[int], str]] = {
    "a+$": lambda n: "a" * n + "!",
    r"(a*)\1!b": lambda n: "a" * n,
    "a*" + "a" * 100 + "b": lambda n: "a" * n,
    r"\s+$": lambda n: " " * n + "x",
}


@pytest.mark.parametrize("pattern", QUICK)
def test_only_a_search_of_few_steps_is_done_at_once(pattern: str) -> None:
    lengths = [n for n in range(0, 3000, 50) if regular_expressions.is_quick(pattern, "x" * n)]
    assert 50 < max(lengths) < 2000
    begin = time.process_time()
    call("RegexMatch", pattern, QUICK[pattern](max(lengths) - 1))
    assert time.process_time() - begin < 1.0
    assert not any(regular_expressions.is_quick(endless, TEXT) for endless in ENDLESS)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(" * 3000 + ")" * 3000, "is not a regular expression"),
        ("a{99999999999999999999}", "is not a regular expression"),
        ("(?:|a){4294967294}", "took more than|cannot be searched for"),
        ("(a|b", "is not a regular expression"),
    ],
)
def test_a_pattern_that_breaks_the_search_is_named(
    pattern: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 1.0 if "took more" in reason else PATIENCE_S  # a process may be long in starting
    monkeypatch.setattr(regular_expressions, "TIME_LIMIT_S", limit_s)
    with pytest.raises(ValueError, match=reason):
        call("RegexMatch", pattern)


LONG: dict[str, Callable[[], object]] = {
    "levels": lambda: sigma_edits.parse("." * 60_000),
    "levels behind a sign": lambda: sigma_edits.parse("-" + "." * 60_000 + "x" + "1" * 60),
    "openings of a drawing": lambda: saving.with_svg_metadata(b"<svg " * 60_000, "about"),
    "openings not closed": lambda: saving.with_svg_metadata(b"<svg" + b" a" * 60_000, "about"),
    "layers to skip": lambda: nodes_slg.layers_of("1 a" * 60_000),
}


@pytest.mark.parametrize("case", LONG)
def test_the_searches_of_nodes_take_no_longer_than_a_text_is_long(case: str) -> None:
    begin = time.process_time()
    LONG[case]()
    assert time.process_time() - begin < 2.0  # where each letter meets each other: half a minute


def test_levels_are_read_as_written() -> None:
    text = "14.6, 2 .5;-1 +3..x 7.25.5 ."
    assert sigma_edits.parse(text).tolist() == pytest.approx([14.6, 2, 0.5, -1, 3, 7.25, 0.5])
