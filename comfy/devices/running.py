"""Which models a call under way runs on: these may be made smaller, but not taken off their device.

Code of a step may load more models, which the plan of the run knew nothing of. What it then takes
from the run's own models has to leave them able to go on: streamed, with their patches and hooks.
What another thread wants of them waits for the end of the present call of the network, which would
find its weights on two devices.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from comfy.devices.loaded_model import LoadedModel


class Run:
    """A call under way, of any thread.

    Args:
        patcher: What it runs on.
        entries: All models that it runs on.
    """

    def __init__(self, patcher: Any, entries: Iterable[LoadedModel]) -> None:
        self.patcher = weakref.ref(patcher)
        self.entries = tuple(entries)
        self.thread = threading.get_ident()
        self._asked: dict[LoadedModel, int] = {}
        others = [e.model for e in self.entries if not e.is_of(patcher)]
        self._shown = [
            (weakref.ref(view), _patches_of(view), getattr(view, "current_hooks", None))
            for view in (patcher, *others)
            if view is not None
        ]

    def show(self) -> None:
        """Have all models show what they showed at the start: patches, if only streamed, and hooks.

        For when an attempt has failed in the middle of a change.
        """
        for ref, patches, _ in self._shown:
            view = ref()
            if view is not None and patches is not None and _patches_of(view) != patches:
                view.partially_load(view.load_device, 1)
            self.show_hooks(view)

    def show_hooks(self, patcher: Any) -> None:
        """Have a patcher show the hooks again that it showed at the start."""
        for ref, _, hooks in self._shown:
            ours = hooks is not None and ref() is patcher
            if ours and patcher.current_hooks is not hooks:
                patcher.patch_hooks(hooks)

    def ask(self, entry: LoadedModel, wanted: int) -> None:
        """Note that another thread wants some bytes of a model freed."""
        self._asked[entry] = max(wanted, self._asked.get(entry, 0))

    def give_what_was_asked(self) -> None:
        """Free what other threads wanted; to be called between calls, by the run's own thread."""
        asked, self._asked = self._asked, {}
        for entry, wanted in asked.items():
            make_smaller(entry, wanted)


def _patches_of(view: Any) -> Any:
    """The identity of the patches that a patcher's module shows; packs bring simpler patchers."""
    return getattr(getattr(view, "residence", None), "uuid", None)


_runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
"""By identity, the outermost first; one that a cancellation ends at any point goes as well."""


@contextmanager
def running(patcher: Any, entries: Iterable[LoadedModel]) -> Iterator[Run]:
    """Note for the length of a block that a call runs on models; arguments as of `Run`."""
    run = Run(patcher, entries)
    _runs[id(run)] = run
    try:
        for outer in [ref() for ref in _runs.valuerefs()]:
            if outer is not None and outer.thread == run.thread:
                outer.give_what_was_asked()  # this call has its hooks shown again after
        yield run
    finally:
        _runs.pop(id(run), None)
    run.give_what_was_asked()


def run_of(entry: LoadedModel) -> Run | None:
    """The innermost call under way that runs on a model."""
    runs = [ref() for ref in _runs.valuerefs()]
    found = [run for run in runs if run is not None and any(e is entry for e in run.entries)]
    return found[-1] if found else None


def patcher_at_work(module: Any) -> Any | None:
    """The patcher that the innermost call under way on a base module was given."""
    patchers = [run.patcher() for ref in _runs.valuerefs() if (run := ref()) is not None]
    found = [patcher for patcher in patchers if getattr(patcher, "model", None) is module]
    return found[-1] if found else None


def is_running(entry: LoadedModel) -> bool:
    """Whether a call under way runs on a model."""
    return run_of(entry) is not None


def make_smaller(entry: LoadedModel, wanted: int) -> None:
    """Free some bytes of a model that a call under way runs on, which then goes on streamed.

    A call of another thread does it when it is between two uses of the network.
    """
    patcher, run = entry.model, run_of(entry)
    if patcher is None:
        return
    if run is not None and run.thread != threading.get_ident():
        run.ask(entry, wanted)
        return
    patcher.partially_unload(patcher.offload_device, wanted)
    if run is not None:
        run.show_hooks(patcher)
