"""Numbers of an English text in words."""

from __future__ import annotations

import re

ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
TENS = (
    "", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
)  # fmt: skip
THOUSANDS = ("", "thousand", "million", "billion", "trillion")
LONGEST = 3 * len(THOUSANDS)  # digits
ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth",
    "nine": "ninth", "twelve": "twelfth",
}  # fmt: skip
COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
NUMBER = re.compile(r"(?<![\d.])(\d+)(?:\.(\d+)|(st|nd|rd|th)\b)?")


def in_words(number: int) -> str:
    """A number below 10^15, as in "one thousand, two hundred and thirty-four"."""
    groups: list[tuple[int, str]] = []
    for name in THOUSANDS:
        number, group = divmod(number, 1000)
        if group:
            groups.insert(0, (group, f"{_below_thousand(group)} {name}".strip()))
    if not groups:
        return ONES[0]
    words = [text for _, text in groups]
    last, _ = groups[-1]
    ends_small = len(groups) > 1 and last < 100 and words[-1] == _below_thousand(last)
    if ends_small:  # one thousand and five
        return f"{', '.join(words[:-1])} and {words[-1]}"
    return ", ".join(words)


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    tens, ones = divmod(rest, 10)
    small = ONES[rest] if rest < len(ONES) else "-".join([TENS[tens], *([ONES[ones]] * (ones > 0))])
    if not hundreds:
        return small
    return f"{ONES[hundreds]} hundred" + (f" and {small}" if rest else "")


def ordinal(number: int) -> str:
    """As `in_words`, of a place in an order: "twenty-first"."""
    words = in_words(number)
    last = re.split(r"[ -]", words)[-1]
    start = words[: len(words) - len(last)]
    if last in ORDINALS:
        return start + ORDINALS[last]
    return start + (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")


def numbers_in_words(text: str) -> str:
    """The text with integers, decimals and ordinals spelled; longer numbers stay."""

    def spelled(found: re.Match[str]) -> str:
        whole, decimals, ending = found.groups()
        if len(whole) > LONGEST:
            return found[0]
        if ending:
            return ordinal(int(whole))
        digits = "".join(f" {ONES[int(digit)]}" for digit in decimals or "")
        return in_words(int(whole)) + (f" point{digits}" if digits else "")

    return NUMBER.sub(spelled, COMMA.sub("", text))
