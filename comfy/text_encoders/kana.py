"""Japanese syllables in Latin letters, after Hepburn, without marks of length."""

from __future__ import annotations

VOWELS = "aiueo"
# Consonant -> hiragana with each vowel; a dot where there is none.
ROWS = {
    "": "あいうえお", "k": "かきくけこ", "s": "さしすせそ", "t": "たちつてと", "n": "なにぬねの",
    "h": "はひふへほ", "m": "まみむめも", "y": "や.ゆ.よ", "r": "らりるれろ", "w": "わゐ.ゑを",
    "g": "がぎぐげご", "z": "ざじずぜぞ", "d": "だぢづでど", "b": "ばびぶべぼ", "p": "ぱぴぷぺぽ",
}  # fmt: skip
HEPBURN = {
    "si": "shi", "ti": "chi", "tu": "tsu", "hu": "fu", "zi": "ji", "di": "ji", "du": "zu",
}  # fmt: skip
SMALL_Y = {"ゃ": "a", "ゅ": "u", "ょ": "o"}
SMALL_VOWELS = dict(zip("ぁぃぅぇぉ", VOWELS))
DOUBLER, NASAL, LENGTHENER = "っ", "ん", "ー"
FIRST_KATAKANA, LAST_KATAKANA, TO_HIRAGANA = "ァ", "ヶ", ord("ぁ") - ord("ァ")


def _syllables() -> dict[str, str]:
    found = {NASAL: "n", "ゔ": "vu", **SMALL_VOWELS}
    for consonant, row in ROWS.items():
        for vowel, sign in zip(VOWELS, row):
            if sign != ".":
                made = consonant + vowel
                found[sign] = HEPBURN.get(made, made)
    for sign, made in list(found.items()):
        if made.endswith("i") and len(made) > 1:
            stem = made[:-1] if made[:-1] in ("sh", "ch", "j") else f"{made[:-1]}y"
            found.update({sign + small: stem + vowel for small, vowel in SMALL_Y.items()})
    return found


SYLLABLES = _syllables()


def in_latin_letters(text: str) -> str:
    """The text with its hiragana and katakana in Latin letters; other signs stay.

    A small tsu doubles the next consonant; a mark of length goes.
    """
    signs = "".join(
        chr(ord(sign) + TO_HIRAGANA) if FIRST_KATAKANA <= sign <= LAST_KATAKANA else sign
        for sign in text
    )
    made, place = [], 0
    while place < len(signs):
        if signs[place] == LENGTHENER:
            place += 1
            continue
        if signs[place] == DOUBLER:
            after = SYLLABLES.get(signs[place + 1 : place + 2], "")
            made.append("" if after[:1] in VOWELS else after[0])
            place += 1
            continue
        length = 2 if signs[place : place + 2] in SYLLABLES else 1
        sign = signs[place : place + length]
        made.append(SYLLABLES.get(sign, text[place : place + length]))
        place += length
    return "".join(made)
