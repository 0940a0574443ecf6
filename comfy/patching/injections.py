"""Injections: changes that code makes to a running model and takes back again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from comfy.patching.residence import Residence
from comfy.patching.wrappers import CallbacksMP, PatcherInjection


class Injections:
    """The part of a patcher that runs its injections, exactly once and reversibly."""

    residence: Residence
    injections: dict[str, list[PatcherInjection]]
    is_injected: bool
    skip_injection: bool
    get_all_callbacks: Callable[[str], list[Callable[..., Any]]]

    def inject_model(self) -> None:
        """Run the injections of this view; those already run are taken back on failure."""
        if self.is_injected or self.skip_injection:
            return
        for injections in self.injections.values():
            for injection in injections:
                self.residence.injected.append((self, injection))
                injection.inject(self)
                self.is_injected = True
        if self.is_injected:
            for callback in self.get_all_callbacks(CallbacksMP.ON_INJECT_MODEL):
                callback(self)

    def _injections_in_effect(self) -> bool:
        """Whether exactly this view's injections have run."""
        if self.skip_injection:
            return not self.residence.injected
        wanted = [i for injections in self.injections.values() for i in injections]
        present = [i for owner, i in self.residence.injected if owner is self]
        return present == wanted and len(present) == len(self.residence.injected)

    def eject_model(self) -> None:
        """Take back all injections into the module, whichever view made them.

        Raises:
            Exception: The first that an injection's inverse raised, after all of them were called.
        """
        failure: Exception | None = None
        while self.residence.injected:
            owner, injection = self.residence.injected.pop()
            owner.is_injected = False
            try:
                injection.eject(owner)
            except Exception as error:  # noqa: BLE001 - raised below, after the others
                failure = failure or error
        self.is_injected = False
        if failure is not None:
            raise failure
        for callback in self.get_all_callbacks(CallbacksMP.ON_EJECT_MODEL):
            callback(self)

    @contextmanager
    def use_ejected(self, skip_and_inject_on_exit_only: bool = False) -> Iterator[None]:
        """Run a block without the injections, of this view or another, that are in effect.

        Args:
            skip_and_inject_on_exit_only: Do not inject inside the block either, even if it loads;
                inject this view when the block ends.
        """
        present = [owner for owner, _ in self.residence.injected]
        previous_skip = self.skip_injection
        self.eject_model()
        if skip_and_inject_on_exit_only:
            self.skip_injection = True
        try:
            yield
        finally:
            self.skip_injection = previous_skip
            owners = [self] if skip_and_inject_on_exit_only else present
            for owner in dict.fromkeys(owners):
                owner.inject_model()
