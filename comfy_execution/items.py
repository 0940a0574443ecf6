"""What goes through the queue: the public item tuple, and typed answers about it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from comfy_execution.wire import dump_json

SENSITIVE_EXTRA_DATA_KEYS = ("auth_token_comfy_org", "api_key_comfy_org")
"""Keys of extra_data that are handed to nodes and shown, stored and logged nowhere."""

QueueItem = tuple[float, str, dict[str, Any], dict[str, Any], list[str], dict[str, Any]]
"""(number, prompt_id, prompt, extra_data, output ids, secret extra data)."""


class Interrupt(Protocol):
    """The cancellation flag that running nodes look at."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...


class ExecutionStatus(NamedTuple):
    """How a prompt ended; ``messages`` holds (event name, data) in the order of sending."""

    status_str: str  # "success" or "error"
    completed: bool
    messages: list[Any]


class ItemTexts(NamedTuple):
    """JSON of the large parts of a queue item as it was accepted.

    Journal and history show these, whatever happens to the item while it runs.
    """

    prompt: str
    extra_data: str

    @classmethod
    def of(cls, item: Sequence[Any]) -> ItemTexts:
        """Those of an item."""
        return cls(dump_json(item[2]), dump_json(item[3]))


class SubmissionKind(Enum):
    """What became of a submitted prompt."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Submission:
    """Answer to a submission; a server turns CONFLICT into status 409."""

    kind: SubmissionKind
    prompt_id: str
    number: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """A prompt that is about to wait in the queue.

    Attributes:
        item: What was accepted.
        texts: JSON of its parts.
        fingerprint: Digest of the posted body.
        arrival: Orders prompts of equal number.
    """

    item: QueueItem
    texts: ItemTexts
    fingerprint: str
    arrival: int


class CancelOutcome(Enum):
    """What cancelling one job did."""

    INTERRUPTED = "interrupted"
    REMOVED = "removed"
    FINISHED = "finished"
    UNKNOWN = "unknown"

    @property
    def cancelled(self) -> bool:
        """Whether the job is stopped, or about to, because of the call."""
        return self in (CancelOutcome.INTERRUPTED, CancelOutcome.REMOVED)


class PromptIdConflictError(ValueError):
    """A prompt with this id is already waiting, running or finished."""

    def __init__(self, prompt_id: str) -> None:
        super().__init__(
            f"prompt id {prompt_id!r} is already in use; leave the id out or choose a new one"
        )
        self.prompt_id = prompt_id


class NotStoredError(RuntimeError):
    """A prompt that could not be put on disk, and so was not queued."""

    def __init__(self, prompt_id: str, error: Exception) -> None:
        super().__init__(
            f"the journal of the queue could not be written ({error}), so prompt {prompt_id} was "
            "not queued; make room on its disk, or start with --no-journal"
        )


def normalize_item(item: Sequence[Any]) -> QueueItem:
    """Turns a five or six item tuple into the six item form, secrets moved to their place.

    Raises:
        ValueError: the item has another length.
    """
    if len(item) not in (5, 6):
        raise ValueError(
            "a queue item is (number, prompt_id, prompt, extra_data, outputs[, secrets]); "
            f"got {len(item)} values"
        )
    number, prompt_id, prompt, extra_data, outputs = item[:5]
    secrets = dict(item[5]) if len(item) == 6 and item[5] else {}
    extra = dict(extra_data or {})
    for key in SENSITIVE_EXTRA_DATA_KEYS:
        if key in extra:
            secrets[key] = extra.pop(key)
    return (number, str(prompt_id), prompt, extra, list(outputs), secrets)


def public_item(item: Sequence[Any]) -> tuple[Any, ...]:
    """The item as queue and history show it: without its secrets."""
    return tuple(item[:5])


def item_json(item: Sequence[Any], texts: ItemTexts) -> str:
    """JSON of an item as queue and history show it, its large parts as they were accepted."""
    number, prompt_id, _, _, *others = public_item(item)
    parts = [dump_json(number), dump_json(prompt_id), *texts, *map(dump_json, others)]
    return f"[{','.join(parts)}]"


def texts_and_fingerprint(item: QueueItem) -> tuple[ItemTexts, str]:
    """The JSON of an item's parts, and the digest of what makes two posted bodies the same job."""
    extra = {key: value for key, value in item[3].items() if key != "create_time"}
    prompt, timeless = dump_json(item[2]), dump_json(extra)
    body = f"{prompt}\n{timeless}\n{dump_json(item[4])}"
    fingerprint = hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()
    if len(extra) == len(item[3]):
        return ItemTexts(prompt, timeless), fingerprint
    time_text = f'"create_time":{dump_json(item[3]["create_time"])}}}'
    return ItemTexts(prompt, f"{timeless[:-1]}{',' if extra else ''}{time_text}"), fingerprint


def history_entry(
    item: Sequence[Any], result: Mapping[str, Any], status: ExecutionStatus | None
) -> dict[str, Any]:
    """What the history shows of a prompt.

    Args:
        item: The queue item without secrets.
        result: ``outputs``, ``meta`` and further keys.
        status: How it ended.
    """
    told = status._asdict() if status is not None else None
    return {"prompt": list(item), "outputs": {}, "status": told, **result}


def cancelled_status(prompt_id: str) -> ExecutionStatus:
    """Status of a prompt that was cancelled before it ran or while its process ended."""
    data = {
        "prompt_id": prompt_id,
        "node_id": "",
        "node_type": "",
        "executed": [],
        "timestamp": time.time_ns() // 1_000_000,
    }
    return ExecutionStatus("error", False, [("execution_interrupted", data)])
