"""What can be wrong with a weight file, as types that name file, cause and mend."""

from __future__ import annotations

import os


class WeightFileError(Exception):
    """A weight file that cannot be used.

    Attributes:
        path: The file.
        cause: What was found.
        mend: What the user can do about it.
    """

    mend_text = "download the file again from its source"

    def __init__(self, path: str | os.PathLike[str], cause: str, mend: str | None = None) -> None:
        self.path = os.fspath(path)
        self.cause = cause
        self.mend = mend or self.mend_text
        super().__init__(f"{self.path}: {cause}. To mend it: {self.mend}.")


class MissingWeightFileError(WeightFileError, FileNotFoundError):
    """There is no such file."""

    mend_text = "put the file there or choose another one from the list"

    def __str__(self) -> str:
        return f"{self.path}: {self.cause}. To mend it: {self.mend}."


class UnreadableWeightFileError(WeightFileError, OSError):
    """The system does not let the file be read."""

    mend_text = "check the file's permissions and the disk it is on"

    def __str__(self) -> str:
        return f"{self.path}: {self.cause}. To mend it: {self.mend}."


class EmptyWeightFileError(WeightFileError):
    """The file has no bytes."""


class TruncatedWeightFileError(WeightFileError):
    """The file ends before its contents do."""

    mend_text = "download it again; the last download was cut off"


class HtmlPageError(WeightFileError):
    """A web page was saved under the name of a model."""

    mend_text = (
        "open the address in a browser, sign in or accept the licence if it asks, and download "
        "the file itself rather than its page"
    )


class LfsPointerError(WeightFileError):
    """A Git LFS pointer stands in for the file."""

    mend_text = "run `git lfs pull` in the repository it came from, or download the file itself"


class NotSafetensorsError(WeightFileError):
    """The contents break the safetensors format."""


class TextFileError(NotSafetensorsError):
    """A text, such as the error message of a web server, was saved under the name of a model."""

    mend_text = (
        "open the address in a browser, sign in or accept the licence if it asks, and download "
        "the file again"
    )


class UnsafePickleError(WeightFileError):
    """A pickled file holds more than weights, so it is not read."""

    mend_text = "use a .safetensors version of the model; pickled files may run code"


class UnknownWeightFormatError(WeightFileError):
    """The contents are in no format this server reads."""

    mend_text = "use a .safetensors file"


class NotANumberError(WeightFileError):
    """The weights are not numbers: every one that was looked at is NaN."""

    mend_text = (
        "download it again; if it stays so, its author saved a failed training or merge: choose "
        "another version"
    )


class NoMatchingWeightsError(WeightFileError):
    """The file was read, but nothing in it belongs to the model it was meant for."""

    mend_text = "choose a file made for this model"
