"""Types for authors of classic nodes: type names, the shape of `INPUT_TYPES`, a base class.

Only for annotations and editors' help; nothing here is needed to write a node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, Literal, TypedDict


class IO(str, Enum):
    """Names of socket types as strings.

    Comparison with `!=` follows sockets, not texts: `*` differs from nothing, and a joined name
    such as `FLOAT,INT` does not differ from a part of it. `==` compares the texts.
    """

    STRING = "STRING"
    IMAGE = "IMAGE"
    MASK = "MASK"
    LATENT = "LATENT"
    BOOLEAN = "BOOLEAN"
    INT = "INT"
    FLOAT = "FLOAT"
    COMBO = "COMBO"
    CONDITIONING = "CONDITIONING"
    SAMPLER = "SAMPLER"
    SIGMAS = "SIGMAS"
    GUIDER = "GUIDER"
    NOISE = "NOISE"
    CLIP = "CLIP"
    CONTROL_NET = "CONTROL_NET"
    VAE = "VAE"
    MODEL = "MODEL"
    LORA_MODEL = "LORA_MODEL"
    LOSS_MAP = "LOSS_MAP"
    CLIP_VISION = "CLIP_VISION"
    CLIP_VISION_OUTPUT = "CLIP_VISION_OUTPUT"
    STYLE_MODEL = "STYLE_MODEL"
    GLIGEN = "GLIGEN"
    UPSCALE_MODEL = "UPSCALE_MODEL"
    AUDIO = "AUDIO"
    WEBCAM = "WEBCAM"
    POINT = "POINT"
    FACE_ANALYSIS = "FACE_ANALYSIS"
    BBOX = "BBOX"
    SEGS = "SEGS"
    VIDEO = "VIDEO"

    ANY = "*"
    NUMBER = "FLOAT,INT"
    PRIMITIVE = "STRING,FLOAT,INT,BOOLEAN"

    def __str__(self) -> str:
        return str(self.value)

    def __ne__(self, other: object) -> bool:
        if not isinstance(other, str):
            return True
        if self.value == "*" or other == "*":
            return False
        mine, theirs = set(self.value.split(",")), set(other.split(","))
        return not (mine <= theirs or theirs <= mine)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) if isinstance(other, str) else False

    __hash__ = str.__hash__


class RemoteInputOptions(TypedDict, total=False):
    """Where the editor fetches the options of a combo from; times in milliseconds."""

    route: str
    refresh_button: bool
    control_after_refresh: Literal["first", "last"]
    timeout: int
    max_retries: int
    refresh: int


class MultiSelectOptions(TypedDict, total=False):
    """How a combo for several values looks."""

    placeholder: str
    chip: bool


class InputTypeOptions(TypedDict, total=False):
    """Options of one input; keys that are not listed here are passed to the editor unchanged."""

    default: Any
    defaultInput: bool
    forceInput: bool
    lazy: bool
    rawLink: bool
    tooltip: str
    socketless: bool
    widgetType: str
    hidden: bool
    advanced: bool
    # numbers
    min: float
    max: float
    step: float
    round: float
    display: str
    control_after_generate: bool | str
    # switches
    label_on: str
    label_off: str
    # texts
    placeholder: str
    multiline: bool
    dynamicPrompts: bool
    # choices
    options: list[str | int | float]
    image_upload: bool
    image_folder: Literal["input", "output", "temp"]
    remote: RemoteInputOptions
    multi_select: MultiSelectOptions


class HiddenInputTypeDict(TypedDict, total=False):
    """Values a node can ask for without an input; the name on the left is free."""

    node_id: Literal["UNIQUE_ID"]
    unique_id: Literal["UNIQUE_ID"]
    prompt: Literal["PROMPT"]
    extra_pnginfo: Literal["EXTRA_PNGINFO"]
    dynprompt: Literal["DYNPROMPT"]


class InputTypeDict(TypedDict, total=False):
    """What `INPUT_TYPES` returns: inputs by name in up to three sections."""

    required: dict[str, tuple[Any, ...]]
    optional: dict[str, tuple[Any, ...]]
    hidden: HiddenInputTypeDict


class ComfyNodeABC(ABC):
    """Base class of classic nodes, for those who like the attributes annotated."""

    DESCRIPTION: str
    """Help text."""
    CATEGORY: str
    """Menu path, with slashes."""
    EXPERIMENTAL: bool
    """Whether the editor marks the node as experimental."""
    DEPRECATED: bool
    """Whether the editor hides the node from searches."""
    DEV_ONLY: bool
    """Whether the editor shows the node to developers only."""
    API_NODE: bool | None
    """Whether the node calls a paid service."""

    OUTPUT_NODE: bool
    """Whether the node is worth running for its own sake."""
    INPUT_IS_LIST: bool
    """Whether every input arrives as a list, all at once."""
    OUTPUT_IS_LIST: tuple[bool, ...]
    """For each output whether it is a list whose items are handed on one by one."""
    RETURN_TYPES: tuple[IO | str, ...]
    """Type of each output."""
    RETURN_NAMES: tuple[str, ...]
    """Label of each output; the types if absent."""
    OUTPUT_TOOLTIPS: tuple[str, ...]
    """Help text of each output."""
    FUNCTION: str
    """Name of the method that does the work."""

    @classmethod
    @abstractmethod
    def INPUT_TYPES(cls) -> InputTypeDict:
        """Declares the inputs."""


class CheckLazyMixin:
    """Evaluates every lazy input: a node that adds this never runs with one missing."""

    def check_lazy_status(self, **kwargs: Any) -> list[str]:
        """Names of the inputs that have not been evaluated."""
        return [name for name, value in kwargs.items() if value is None]


class FileLocator(TypedDict):
    """A stored file, as `ui` dictionaries name it."""

    filename: str
    subfolder: str
    type: Literal["input", "output", "temp"]
