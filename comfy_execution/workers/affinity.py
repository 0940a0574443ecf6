"""Which prompt goes to which worker: rather to one that has its models already.

The first prompt of the queue goes first, to the free worker that ran most of its models last; among
equals to one that loses none by it, then to the one that has the results of the same client.
Another one overtakes it only if a free worker has all models of that one and not those of the
first, and only within bounds: so many times, from among the next few, never before an earlier
prompt of the same client, and never past a prompt that somebody has put in front.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

from comfy_execution.graph_utils import is_link
from comfy_execution.pending import Pending, PendingPrompts
from comfy_execution.registry import Registry, SpecTable
from comfy_execution.wire import dump_json

MODEL_TYPES = frozenset(
    {
        "MODEL", "CLIP", "VAE", "CONTROL_NET", "CLIP_VISION", "STYLE_MODEL", "UPSCALE_MODEL",
        "GLIGEN", "PHOTOMAKER", "AUDIO_ENCODER", "LATENT_UPSCALE_MODEL", "MODEL_PATCH",
    }
)  # fmt: skip
"""Output types that mark a node without links as a loader."""

LOOK_AHEAD = 16
"""Prompts among which one is looked for that may overtake the first."""
MOST_OVERTAKEN = 4
"""How often a prompt may be overtaken."""

Models = frozenset[Hashable]
NO_MODELS: Models = frozenset()


def models_of(prompt: dict[str, dict[str, object]], registry: Registry) -> Models:
    """What the loaders of a prompt load: their classes and constant inputs."""
    found, specs = set(), SpecTable(registry)
    for node in prompt.values():
        inputs = node.get("inputs")
        if not isinstance(inputs, dict) or any(map(is_link, inputs.values())):
            continue
        class_type = str(node.get("class_type"))
        spec = specs.get(class_type)
        types = spec.return_types if spec is not None else ()
        if any(isinstance(kind, str) and kind in MODEL_TYPES for kind in types):
            found.add((class_type, dump_json(inputs, sort_keys=True)))
    return frozenset(found)


class Seatable(Protocol):
    """What is asked of a place."""

    @property
    def models(self) -> Models:
        """Those of the last prompt it ran."""

    @property
    def client(self) -> object:
        """Who posted the last prompt it ran."""

    @property
    def last_used(self) -> int:
        """Orders places by when they were last given a prompt; 0: never."""

    def lacks(self, entry: Pending) -> bool:
        """Whether it cannot run this prompt, for want of a node class."""


PlaceT = TypeVar("PlaceT", bound=Seatable)


def best_place(wanted: Models, client: object, places: Iterable[PlaceT]) -> PlaceT | None:
    """The place with most of these models; among equals as the module says, or longest unused."""

    def cost(place: PlaceT) -> tuple[int, int, bool, int]:
        lost = len(place.models - wanted)
        return -len(wanted & place.models), lost, place.client != client, place.last_used

    return min(places, key=cost, default=None)


class Chooser:
    """Chooses the next prompt and its place; remembers who was overtaken. Not thread-safe.

    Args:
        registry: Knows node classes.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._models: dict[str, Models] = {}
        self._overtaken: dict[str, int] = {}

    def models(self, entry: Pending) -> Models:
        """The models of a waiting prompt; worked out once."""
        known = self._models.get(entry.prompt_id)
        if known is None:
            known = self._models[entry.prompt_id] = models_of(entry.item[2], self._registry)
        return known

    def choose(
        self, pending: PendingPrompts, free: Sequence[PlaceT]
    ) -> tuple[Pending, PlaceT] | None:
        """The next prompt and the place for it; None if none of these places can run one now."""
        waiting = list(itertools.islice(pending, LOOK_AHEAD))
        self._forget_all_but(waiting)
        first = waiting[0]
        able = [place for place in free if not place.lacks(first)]
        best = best_place(self.models(first), _client(first), able)
        if best is None:  # it waits for a busy place
            return self._overtaking(waiting, free, with_models=False)
        overtaken = self._overtaken.get(first.prompt_id, 0)
        is_patient = overtaken < MOST_OVERTAKEN and first.order[0] >= 0
        if is_patient and not self.models(first) <= best.models:
            other = self._overtaking(waiting, free, with_models=True)
            if other is not None:
                self._overtaken[first.prompt_id] = overtaken + 1
                return other
        return first, best

    def _overtaking(
        self, waiting: Sequence[Pending], free: Sequence[PlaceT], *, with_models: bool
    ) -> tuple[Pending, PlaceT] | None:
        """A later prompt, no client's second one here, and a free place: with all its models."""
        clients = {_client(waiting[0])}
        for entry in waiting[1:]:
            client, wanted = _client(entry), self.models(entry)
            able = [place for place in free if not place.lacks(entry)]
            if with_models:
                able = [place for place in able if wanted and wanted <= place.models]
            place = best_place(wanted, client, able)
            if place is not None and client not in clients:
                return entry, place
            clients.add(client)
        return None

    def _forget_all_but(self, waiting: Iterable[Pending]) -> None:
        names = {entry.prompt_id for entry in waiting}
        self._models = {name: v for name, v in self._models.items() if name in names}
        self._overtaken = {name: v for name, v in self._overtaken.items() if name in names}


def _client(entry: Pending) -> object:
    return entry.item[3].get("client_id")
