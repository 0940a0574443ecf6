"""The folder of the day, in which results are saved with `--date-based-output`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

WORDS = {"YYYY": "%Y", "yyyy": "%Y", "MM": "%m", "DD": "%d", "dd": "%d"}


def folder_of_today(text: str) -> str:
    """The folder of today, relative, for a format such as `%Y-%m-%d` or `YYYY/MM/DD`.

    Args:
        text: Codes of `time.strftime`; without any, the words YYYY, MM and DD.
    Raises:
        ValueError: the result is empty, absolute or leads upwards.
    """
    codes = text
    if "%" not in text:
        for word, code in WORDS.items():
            codes = codes.replace(word, code)
    name = "" if "\0" in text else time.strftime(codes).strip().replace("\\", "/")
    folder = os.path.normpath(name or ".")
    if folder == "." or os.path.isabs(folder) or ".." in name.split("/"):
        raise ValueError(
            f"the date format {text!r} stands for no folder below the output folder; use for "
            "instance %Y-%m-%d"
        )
    return folder


def day_folder(
    text: str | None, prefix: str, output_dir: str, results: str, model_folders: Iterable[str]
) -> str:
    """Sub-folder of today for the file of a prefix; empty where there is none.

    Only results have one. What is saved where models are looked for has to stay there, and an
    absolute prefix says all there is to say.

    Args:
        text: Format of the folder; None: there is none.
        output_dir: Where the prefix counts from.
        results: The output folder.
    """
    if text is None or os.path.isabs(prefix):
        return ""
    target = os.path.join(output_dir, os.path.dirname(os.path.normpath(prefix)))
    if not _is_below(target, results) or any(_is_below(target, place) for place in model_folders):
        return ""
    return folder_of_today(text)


def _is_below(path: str, folder: str) -> bool:
    path, folder = os.path.abspath(path), os.path.abspath(folder)
    return path == folder or path.startswith(os.path.join(folder, ""))
