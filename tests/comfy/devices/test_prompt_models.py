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


class SimplePatcher:
    """A pack's patcher that answers only what it is asked by the planner."""

    def __init__(self) -> None:
        self.model = Module()

    def model_patches_to(self, device: object) -> None: ...


class Control:
    """Stands for a ControlNet in a conditioning's options."""

    def __init__(self) -> None:
        self.wrapped = Patcher()

    def get_control(self) -> None: ...

    def get_models(self) -> list[Patcher]:
        return [self.wrapped]


class Guider:
    """Stands for a guider, which carries the patcher it samples with."""

    def __init__(self) -> None:
        self.model_patcher = SimplePatcher()


def test_models_inside_conditioning_guiders_and_simple_patchers_are_known() -> None:
    tracker, control, guider, simple = PromptModelTracker(), Control(), Guider(), SimplePatcher()
    empty = SimplePatcher()
    del empty.model
    for value in ([["tensor", {"control": control}]], guider, [simple], empty, [[0] * 5000] * 3):
        tracker.add(value)
    wanted = (control.wrapped.model, guider.model_patcher.model, simple.model)
    assert all(tracker.references(model) for model in wanted)
    assert len(tracker.models()) == 3
