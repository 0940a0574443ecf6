"""The object through which nodes report, its versions and its twin without async."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest
import torch
from PIL import Image

from comfy_api.feature_flags import get_connection_feature, get_server_features, supports_feature
from comfy_api.internal.api_registry import all_versions
from comfy_api.internal.async_to_sync import create_sync_class, run_sync
from comfy_api.latest import ComfyAPI, ComfyAPISync, ComfyExtension, io
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_execution.context import ExecutionContext, executing, interrupt_check
from comfy_execution.events import Event, Preview, Progress
from comfy_execution.graph import DynamicPrompt
from comfy_execution.progress import ProgressRegistry, reset_progress_state


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def publish(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def recorder() -> Recorder:
    recorder = Recorder()
    prompt = DynamicPrompt({"7": {"class_type": "N", "inputs": {}}})
    reset_progress_state(ProgressRegistry("p", prompt, recorder, "client"))
    return recorder


async def test_progress_is_reported_for_the_running_node(recorder: Recorder) -> None:
    with executing(ExecutionContext("p", "7")):
        await ComfyAPI().execution.set_progress(2, 5)
    [step] = recorder.of(Progress)
    assert (step.value, step.max, step.node, step.prompt_id) == (2, 5, "7", "p")


@pytest.mark.parametrize(
    "picture",
    [torch.ones(8, 6, 3), torch.ones(1, 8, 6, 3), Image.new("RGB", (6, 8), "white")],
    ids=["picture", "batch", "PIL"],
)
async def test_a_preview_goes_along_in_any_form(recorder: Recorder, picture: Any) -> None:
    await ComfyAPI().execution.set_progress(1, 2, node_id="7", preview_image=picture)
    await ComfyAPI().execution.set_progress(1, 2, "7", picture, ignore_size_limit=True)
    small, _, large, _ = recorder.of(Preview)
    assert small.image.size == (6, 8)
    assert small.image.getpixel((0, 0)) == (255, 255, 255)
    assert (small.max_size, large.max_size) == (512, None)


async def test_progress_without_a_node_is_refused() -> None:
    with pytest.raises(ValueError, match="outside of a running node"):
        await ComfyAPI().execution.set_progress(1, 2)


async def test_reporting_progress_notices_an_interruption(recorder: Recorder) -> None:
    class Stopped(BaseException):
        pass

    def stop() -> None:
        raise Stopped

    token = interrupt_check.set(stop)
    try:
        with pytest.raises(Stopped):
            await ComfyAPI().execution.set_progress(1, 2, node_id="7")
    finally:
        interrupt_check.reset(token)
    assert recorder.events == []


async def test_the_twin_works_inside_a_running_loop(recorder: Recorder) -> None:
    with executing(ExecutionContext("p", "7")):
        ComfyAPISync().execution.set_progress(value=3, max_value=4)
    assert [step.node for step in recorder.of(Progress)] == ["7"]


def test_the_twin_works_without_a_loop_and_passes_errors_on() -> None:
    class Async:
        kind = "plain"

        async def double(self, number: int) -> int:
            await asyncio.sleep(0)
            return 2 * number

        async def fail(self) -> None:
            raise KeyError("why")

    twin = create_sync_class(Async)()
    assert twin.double(number=4) == 8
    assert twin.kind == "plain"
    with pytest.raises(KeyError, match="why"):
        twin.fail()


async def test_errors_cross_the_thread_of_a_twin() -> None:
    async def fail() -> None:
        raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        run_sync(fail())


@pytest.mark.parametrize("name", ["latest", "v0_0_1", "v0_0_2"])
def test_each_version_has_its_objects(name: str) -> None:
    module = importlib.import_module(f"comfy_api.{name}")
    assert hasattr(module.ComfyAPI().execution, "set_progress")
    assert module.ComfyAPISync().VERSION == module.ComfyAPI.VERSION
    for owner, member in (("Types", "MESH"), ("InputImpl", "VideoFromFile"), ("Input", "Image")):
        assert isinstance(getattr(getattr(module, owner), member), type)


def test_the_versions_are_known_oldest_first() -> None:
    assert [version.version for version in all_versions()] == ["0.0.1", "0.0.2", "latest"]


async def test_an_extension_lists_its_nodes() -> None:
    class Node(io.ComfyNode):
        pass

    class Mine(ComfyExtension):
        async def get_node_list(self) -> list[type[io.ComfyNode]]:
            return [Node]

    extension = Mine()
    await extension.on_load()
    assert await extension.get_node_list() == [Node]
    with pytest.raises(TypeError):
        ComfyExtension()  # type: ignore[abstract]


def test_flags_of_clients_are_found_by_dotted_name() -> None:
    known = {"a": {"feature_flags": {"one": True, "deep": {"two": 2}, "text": "yes"}}}
    assert supports_feature(known, "a", "one")
    assert not supports_feature(known, "a", "text")
    assert not supports_feature(known, "b", "one")
    assert get_connection_feature(known, "a", "deep.two") == 2
    assert get_connection_feature(known, "a", "deep.none", 5) == 5
    get_server_features()["own"] = True
    assert "own" not in get_server_features()


def test_compiled_parts_serve_one_call_and_leave_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.diffusion_model = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])

    class Patcher:
        def __init__(self) -> None:
            self.model = Model()
            self.wrappers: dict[tuple[str, str], list[Any]] = {}

        def get_model_object(self, name: str) -> Any:
            return self.model.get_submodule(name)

        def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
            self.wrappers.setdefault((kind, key), []).append(wrapper)

        def remove_wrappers_with_key(self, kind: str, key: str) -> None:
            self.wrappers.pop((kind, key), None)

    class Executor:
        def __init__(self, model: Model) -> None:
            self.class_obj = model

        def __call__(self, number: int) -> tuple[int, Any]:
            return number, self.class_obj.diffusion_model[1]

    compiled = torch.nn.ReLU()
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        torch, "compile", lambda module, **kwargs: (asked.append(kwargs), compiled)[1]
    )
    patcher = Patcher()
    original = patcher.model.diffusion_model[1]
    for _ in range(2):
        set_torch_compile_wrapper(patcher, "inductor", mode="m", keys=["diffusion_model.1"])
    [wrapper] = patcher.wrappers["apply_model", "torch.compile"]
    assert wrapper(Executor(patcher.model), 3) == (3, compiled)
    assert patcher.model.diffusion_model[1] is original
    assert asked[0]["backend"] == "inductor"
    assert asked[0]["mode"] == "m"
