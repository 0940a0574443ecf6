"""Which models a prompt references."""

from __future__ import annotations

from comfy.devices.prompt_models import PromptModelTracker


class Module:
    """Stands for a base module."""


class Patcher:
    """The part of a model patcher that the tracker looks at."""

    def __init__(self, *additional: Patcher) -> None:
        self.model, self.additional = Module(), additional

    def model_patches_to(self, device: object) -> None: ...

    def get_nested_additional_models(self) -> list[Patcher]:
        return list(self.additional)


class Holder:
    """Stands for a CLIP or VAE, which carries its patcher."""

    def __init__(self) -> None:
        self.patcher = Patcher()


def test_models_on_links_are_known_while_the_prompt_runs() -> None:
    tracker, extra = PromptModelTracker(), Patcher()
    model, holder = Patcher(extra), Holder()
    with tracker.running():
        for value in (model, {"vae": holder}, "text", 3, None):
            tracker.add(value)
        assert all(tracker.references(each.model) for each in (model, extra, holder.patcher))
        assert not tracker.references(Patcher().model)
    assert tracker.models() == []


def test_the_tracker_keeps_no_model_alive() -> None:
    tracker = PromptModelTracker()
    tracker.add([Patcher()])
    assert tracker.models() == []
