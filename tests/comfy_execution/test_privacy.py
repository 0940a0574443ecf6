"""Users with files of their own never get each other's results; everything else stays shared."""

from __future__ import annotations

from typing import Any

import pytest

from comfy_execution.caching import RAMPressureCache, ResultCache, make_cache
from comfy_execution.graph_utils import GraphBuilder
from comfy_execution.planning import plan_prompt
from comfy_execution.privacy import Privacy
from tests.comfy_execution.support import Bench, make, node, spec_free


class Folders:
    """Files of users, which nodes look up by the name of the one whose prompt runs."""

    def __init__(self) -> None:
        self.user, self.uses = "ann", 0

    def look_up(self) -> str:
        self.uses += 1
        return self.user

    def privacy(self) -> Privacy:
        return Privacy(lambda: self.user, lambda: self.uses)


class Case:
    """A bench whose Read node reads the asker's file, and nodes around it."""

    def __init__(self, cache: ResultCache | None = None) -> None:
        self.folders = folders = Folders()

        def read(node: Any, name: str) -> tuple[str]:
            type(node).calls.append(name)
            return (f"{name} of {folders.look_up()}",)

        def keep(node: Any) -> None:
            node.folder = folders.look_up()

        def write(node: Any, value: Any) -> dict[str, Any]:
            type(node).calls.append(value)
            return {"ui": {"value": [f"{value} in {node.folder}"]}}

        async def read_slowly(node: Any, name: str) -> tuple[str]:
            return read(node, name)

        def expand(node: Any, name: str) -> dict[str, Any]:
            graph = GraphBuilder()
            return {"result": (graph.node("Read", name=name).out(0),), "expand": graph.finalize()}

        free = {"required": {"name": ("STRING",)}}
        show = {"inputs": spec_free("value"), "OUTPUT_NODE": True, "RETURN_TYPES": ()}
        self.classes = {
            "Read": node("Read", free, run=read, RETURN_TYPES=("*",)),
            "ReadSlowly": node("ReadSlowly", free, run=read_slowly, RETURN_TYPES=("*",)),
            "Expand": node("Expand", free, run=expand, RETURN_TYPES=("*",)),
            "Write": node("Write", **show, __init__=keep, run=write),
        }
        self.bench = Bench(cache, self.classes, privacy=folders.privacy())

    def run_as(self, user: str, prompt: dict[str, Any]) -> Any:
        """What output node 9 shows to this user."""
        if self.folders.user != user:
            self.bench.executor.caches.objects.clear()  # as the program does
        self.folders.user = user
        return self.bench.run(prompt)["outputs"]["9"]["value"][0]


def reading(class_type: str) -> dict[str, Any]:
    return {
        "1": make(class_type, name="a.png"),
        "2": make("Number", value=3),
        "8": make("Show", value=["2", 0]),
        "9": make("Show", value=["1", 0]),
    }


@pytest.mark.parametrize("class_type", ["Read", "ReadSlowly", "Expand"])
@pytest.mark.parametrize("policy", ["classic", "lru", "ram"])
def test_no_user_gets_what_another_ones_file_gave(class_type: str, policy: str) -> None:
    ram = RAMPressureCache(0, lambda: 1, lambda entry: 1)
    made = {"classic": None, "lru": make_cache("lru", lru_size=50), "ram": ram}
    case = Case(made[policy])
    prompt = reading(class_type)
    assert [case.run_as(user, prompt) for user in ("ann", "bob", "ann", "cid")] == [
        "a.png of ann", "a.png of bob", "a.png of ann", "a.png of cid",
    ]  # fmt: skip


def test_a_users_own_result_is_kept_and_what_is_the_same_for_all_is_shared() -> None:
    case = Case(make_cache("lru", lru_size=50))
    for user in ("ann", "ann", "bob", "ann", "bob"):
        case.run_as(user, reading("Read"))
    assert case.classes["Read"].calls == ["a.png"] * 2
    assert case.bench.registry.classes["Number"].calls == [3]


def test_an_object_that_remembers_its_users_folder_serves_nobody_else() -> None:
    case = Case(make_cache("lru", lru_size=50))
    prompt = {"1": make("Number", value=1), "9": make("Write", value=["1", 0])}
    assert case.run_as("ann", prompt) == "1 in ann"
    prompt["1"]["inputs"]["value"] = 2  # the object is the same, and asks for no folder any more
    assert case.run_as("ann", prompt) == "2 in ann"
    assert case.run_as("bob", prompt) == "2 in bob"


def test_an_expanded_result_from_the_cache_stays_its_owners() -> None:
    case = Case(make_cache("lru", lru_size=50))
    expanding = {"1": make("Expand", name="a"), "9": make("Show", value=["1", 0])}
    case.run_as("ann", {"1": make("Read", name="a"), "9": make("Show", value=["1", 0])})
    assert case.run_as("ann", expanding) == "a of ann"
    assert case.run_as("bob", expanding) == "a of bob"


async def test_a_dry_run_knows_whose_results_are_known() -> None:
    case = Case(make_cache("lru", lru_size=50))
    prompt = {"1": make("Read", name="a"), "9": make("Show", value=["1", 0])}
    run = case.bench.executor.execute_async
    await run(prompt, "p", {}, ["9"])

    async def cached_for(user: str) -> list[str]:
        case.folders.user = user
        executor = case.bench.executor
        plan = await plan_prompt(
            prompt, ["9"], executor.registry, executor.caches.outputs, {}, executor.options.privacy
        )
        return plan.cached

    assert sorted(await cached_for("ann")) == ["1", "9"]
    assert await cached_for("bob") == []
