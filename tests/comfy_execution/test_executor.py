"""What a prompt does, seen from outside: results, events, history."""

from __future__ import annotations

import errno
import os
import re
import threading
from typing import Any

import pytest

from comfy_execution.graph_utils import ExecutionBlocker, GraphBuilder
from tests.comfy_execution.support import (
    POLICIES,
    Add,
    Bench,
    Fail,
    Number,
    Show,
    Slow,
    all_caches,
    make,
    node,
    spec_free,
)


@pytest.fixture(params=POLICIES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(all_caches()[request.param])


SUM = {
    "1": make("Number", value=3),
    "2": make("Add", a=["1", 0], b=4),
    "3": make("Show", value=["2", 0]),
}


def test_a_chain_of_nodes_gives_its_result(bench: Bench) -> None:
    assert bench.values(bench.run(SUM)) == {"3": [7]}
    assert bench.executor.success


def test_a_node_runs_once_however_many_use_it(bench: Bench) -> None:
    prompt = {"1": make("Number", value=1)}
    prompt |= {f"a{i}": make("Add", a=["1", 0], b=i) for i in range(10)}
    prompt |= {f"s{i}": make("Show", value=[f"a{i}", 0]) for i in range(10)}
    bench.run(prompt)
    assert Number.calls == [1]
    assert len(Add.calls) == 10


def test_an_unchanged_prompt_runs_nothing_again() -> None:
    bench = Bench()
    bench.run(SUM)
    result = bench.run(SUM)
    assert len(Number.calls) == len(Add.calls) == len(Show.calls) == 1
    assert bench.values(result) == {"3": [7]}
    assert bench.sink.named("execution_cached")[0]["nodes"] == ["1", "2", "3"]
    assert "executing" not in bench.sink.names()


def test_only_what_changed_and_what_follows_runs_again() -> None:
    bench = Bench()
    bench.run(SUM)
    result = bench.run(SUM | {"2": make("Add", a=["1", 0], b=5)})
    assert Number.calls == [3]
    assert Add.calls == [(3, 4), (3, 5)]
    nodes = result["nodes"]
    assert nodes["2"]["reason"] == "changed input: b"
    assert nodes["3"]["reason"] == "changed input: value"


def test_cached_outputs_are_in_the_history_without_a_client() -> None:
    bench = Bench()
    bench.run(SUM)
    assert bench.values(bench.run(SUM, client_id=None)) == {"3": [7]}


def test_without_a_cache_every_prompt_runs_every_node() -> None:
    bench = Bench(all_caches()["none"])
    bench.run(SUM)
    bench.run(SUM)
    assert len(Number.calls) == len(Show.calls) == 2


def test_nodes_with_equal_inputs_share_one_result() -> None:
    bench = Bench()
    prompt = {
        "1": make("Number", value=2),
        "2": make("Number", value=2),
        "3": make("Add", a=["1", 0], b=["2", 0]),
        "4": make("Show", value=["3", 0]),
    }
    assert bench.values(bench.run(prompt)) == {"4": [4]}
    assert Number.calls == [2]


def test_renumbered_nodes_are_found_in_the_cache_and_reported_under_the_new_id() -> None:
    bench = Bench()
    bench.run(SUM)
    renamed = {
        "x": make("Number", value=3),
        "y": make("Add", a=["x", 0], b=4),
        "z": make("Show", value=["y", 0]),
    }
    result = bench.run(renamed)
    assert Number.calls == [3]
    assert result["meta"]["z"]["node_id"] == "z"


def test_int_and_float_constants_are_different_inputs() -> None:
    bench = Bench()
    bench.run({"1": make("Number", value=1), "2": make("Show", value=["1", 0])})
    bench.run({"1": make("Number", value=1.0), "2": make("Show", value=["1", 0])})
    assert [type(value) for value in Number.calls] == [int, float]


def test_a_cached_output_whose_file_vanished_is_made_again() -> None:
    present = True
    bench = Bench(ui_is_valid=lambda ui: present)
    bench.run(SUM)
    present = False
    bench.run(SUM)
    assert len(Show.calls) == 2
    assert len(Number.calls) == 1


def test_only_the_named_outputs_run() -> None:
    bench = Bench()
    prompt = SUM | {"4": make("Number", value=9), "5": make("Show", value=["4", 0])}
    result = bench.run(prompt, ["5"])
    assert list(result["outputs"]) == ["5"]
    assert Number.calls == [9]


def test_a_branch_left_out_of_one_run_stays_cached() -> None:
    bench = Bench()
    prompt = SUM | {"4": make("Number", value=9), "5": make("Show", value=["4", 0])}
    bench.run(prompt)
    bench.run(prompt, ["5"])
    bench.run(prompt)
    assert sorted(Number.calls) == [3, 9]


def test_nodes_gone_from_the_prompt_leave_the_classic_cache() -> None:
    bench = Bench()
    bench.run(SUM)
    bench.run({"9": make("Number", value=1), "10": make("Show", value=["9", 0])})
    bench.run(SUM)
    assert Number.calls == [3, 1, 3]


def test_the_lru_cache_remembers_across_prompts() -> None:
    bench = Bench(all_caches()["ram_plenty"])
    bench.run(SUM)
    bench.run({"9": make("Number", value=1), "10": make("Show", value=["9", 0])})
    bench.run(SUM)
    assert Number.calls == [3, 1]


def test_nothing_runs_for_an_output_whose_own_result_is_all_that_is_left() -> None:
    bench = Bench(all_caches()["lru_one"])
    bench.run(SUM)
    Number.calls.clear()
    assert bench.values(bench.run(SUM)) == {"3": [7]}
    assert Number.calls == []


def test_what_others_need_is_kept_though_a_known_output_needs_it_no_more() -> None:
    bench = Bench(all_caches()["lru_one"])
    prompt = {
        "1": make("Number", value=2),
        "2": make("Add", a=["1", 0], b=["1", 0]),
        "last": make("Show", value=["2", 0]),
    }
    bench.run(prompt, ["last"])
    prompt |= {"3": make("Add", a=["1", 0], b=1), "x": make("Show", value=["3", 0])}
    prompt |= {"y": make("Show", value=["1", 0])}
    result = bench.run(prompt, ["y", "x", "last"])
    assert bench.values(result) == {"x": [3], "y": [2], "last": [4]}


# --- lists ----------------------------------------------------------------------------------------


def numbers_list(*values: int) -> type:
    return node("List", OUTPUT_IS_LIST=(True,), run=lambda self: (list(values),))


def test_a_node_runs_once_for_each_item_and_short_lists_repeat_their_last(bench: Bench) -> None:
    bench.registry.classes |= {"Three": numbers_list(1, 2, 3), "Two": numbers_list(10, 20)}  # type: ignore[operator]
    prompt = {
        "1": make("Three"),
        "2": make("Two"),
        "3": make("Add", a=["1", 0], b=["2", 0]),
        "4": make("Show", value=["3", 0]),
    }
    assert bench.values(bench.run(prompt)) == {"4": [11, 22, 23]}


def test_an_input_list_node_gets_everything_at_once_as_lists() -> None:
    seen: list[Any] = []

    def run(self: Any, items: Any, factor: Any) -> tuple[int]:
        seen.append((items, factor))
        return (sum(items) * factor[0],)

    total = node(
        "Total", {"required": {"items": ("INT",), "factor": ("INT",)}}, INPUT_IS_LIST=True, run=run
    )
    bench = Bench(classes={"Three": numbers_list(1, 2, 3), "Total": total})
    prompt = {
        "1": make("Three"),
        "2": make("Total", items=["1", 0], factor=2),
        "3": make("Show", value=["2", 0]),
    }
    assert bench.values(bench.run(prompt)) == {"3": [12]}
    assert seen == [([1, 2, 3], [2])]


def test_an_empty_list_output_is_an_error_that_names_source_slot_and_count() -> None:
    bench = Bench(classes={"Empty": numbers_list()})
    bench.run({"1": make("Empty"), "2": make("Show", value=["1", 0])})
    assert bench.error["node_id"] == "2"
    for part in ("output 0", "node 1", "0 values"):
        assert part in bench.error["exception_message"]


def test_a_short_output_is_list_declaration_means_false_for_the_rest() -> None:
    two = node(
        "Two", RETURN_TYPES=("INT", "INT"), OUTPUT_IS_LIST=(True,),
        run=lambda self: ([1, 2], 5),
    )  # fmt: skip
    bench = Bench(classes={"Two": two})
    prompt = {
        "1": make("Two"),
        "2": make("Add", a=["1", 0], b=["1", 1]),
        "3": make("Show", value=["2", 0]),
    }
    assert bench.values(bench.run(prompt)) == {"3": [6, 7]}


# --- hidden inputs, defaults, state ---------------------------------------------------------------


def test_hidden_inputs_arrive_and_unknown_ones_do_not() -> None:
    seen: dict[str, Any] = {}

    def run(self: Any, **kwargs: Any) -> tuple[int]:
        seen.update(kwargs)
        return (0,)

    hidden = {
        "prompt": "PROMPT", "png": "EXTRA_PNGINFO", "me": "UNIQUE_ID", "graph": "DYNPROMPT",
        "hint": "SOMETHING", "odd": (None,),
    }  # fmt: skip
    asks = node("Asks", {"hidden": hidden}, run=run, OUTPUT_NODE=True)
    bench = Bench(classes={"Asks": asks})
    prompt = {"7": make("Asks")}
    bench.run(prompt, extra_pnginfo={"workflow": {}})
    assert seen["me"] == "7"
    assert seen["prompt"] == prompt
    assert seen["png"] == {"workflow": {}}
    assert seen["graph"].get_node("7") == prompt["7"]
    assert "hint" not in seen
    assert "odd" not in seen


def test_undeclared_constants_are_dropped_and_undeclared_links_are_handed_on() -> None:
    seen: dict[str, Any] = {}

    def run(self: Any, **kwargs: Any) -> tuple[int]:
        seen.update(kwargs)
        return (0,)

    bench = Bench(classes={"Any": node("Any", run=run, OUTPUT_NODE=True)})
    bench.run({"1": make("Number", value=5), "2": make("Any", constant=1, link=["1", 0])})
    assert seen == {"link": 5}


def test_open_ended_inputs_take_any_name() -> None:
    class Open(dict):  # type: ignore[type-arg]
        def __contains__(self, key: object) -> bool:
            return True

        def __getitem__(self, key: str) -> Any:
            return ("*",)

    seen: dict[str, Any] = {}

    def run(self: Any, **kwargs: Any) -> tuple[int]:
        seen.update(kwargs)
        return (0,)

    bench = Bench(classes={"Open": node("Open", {"optional": Open()}, run=run, OUTPUT_NODE=True)})
    bench.run({"1": make("Open", whatever=3)})
    assert seen == {"whatever": 3}


def test_instances_are_kept_between_prompts_for_the_same_node() -> None:
    class Counter:
        RETURN_TYPES = ("INT",)
        FUNCTION = "run"

        def __init__(self) -> None:
            self.count = 0

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            return {"required": {"salt": ("INT",)}}

        def run(self, salt: int) -> tuple[int]:
            self.count += 1
            return (self.count,)

    bench = Bench(classes={"Counter": Counter})
    for expected in (1, 2, 3):
        prompt = {"1": make("Counter", salt=expected), "2": make("Show", value=["1", 0])}
        assert bench.values(bench.run(prompt)) == {"2": [expected]}


def test_a_raw_link_input_gets_the_link_itself(bench: Bench) -> None:
    inputs = {"required": {"link": ("*", {"rawLink": True})}}
    raw = node("Raw", inputs, run=lambda self, link: (link,))
    bench.registry.classes["Raw"] = raw  # type: ignore[index]
    prompt = {
        "1": make("Number", value=1),
        "2": make("Raw", link=["1", 0]),
        "3": make("Show", value=["2", 0]),
    }
    assert bench.values(bench.run(prompt)) == {"3": [["1", 0]]}


def test_a_wrapped_list_is_a_constant_even_if_it_looks_like_a_link() -> None:
    bench = Bench()
    result = bench.run({"1": make("Show", value={"__value__": ["7", 0]})})
    assert bench.values(result) == {"1": [["7", 0]]}


# --- change ---------------------------------------------------------------------------------------


def test_is_changed_decides_with_constants_and_hidden_values_only() -> None:
    seen: list[dict[str, Any]] = []
    answer: Any = "a"

    class Watcher(Number):
        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            required = {"value": ("INT",), "link": ("INT",)}
            return {"required": required, "hidden": {"me": "UNIQUE_ID"}}

        @classmethod
        def IS_CHANGED(cls, **kwargs: Any) -> Any:
            seen.append(kwargs)
            return answer

        def run(self, value: int, link: int, me: str) -> tuple[int]:
            return super().run(value)

    bench = Bench(classes={"Watcher": Watcher})
    prompt = {
        "1": make("Number", value=1),
        "2": make("Watcher", value=5, link=["1", 0]),
        "3": make("Show", value=["2", 0]),
    }
    bench.run(prompt)
    bench.run(prompt)
    assert Watcher.calls == [5]
    assert seen[0] == {"value": 5, "link": None, "me": "2"}
    answer = "b"
    result = bench.run(prompt)
    assert Watcher.calls == [5, 5]
    assert "IS_CHANGED" in result["nodes"]["2"]["reason"]


@pytest.mark.parametrize("answer", [float("nan"), [float("nan")], object()])
def test_what_is_not_equal_to_itself_means_always(answer: Any) -> None:
    kind = node("Always", run=lambda self: (1,), IS_CHANGED=classmethod(lambda cls: answer))
    bench = Bench(classes={"Always": kind})
    prompt = {"1": make("Always"), "2": make("Show", value=["1", 0])}
    bench.run(prompt)
    bench.run(prompt)
    assert len(Show.calls) == 2


def test_a_failing_is_changed_means_always_and_does_not_fail_the_prompt() -> None:
    def broken(cls: type) -> None:
        raise KeyError("x")

    kind = node("Broken", run=lambda self: (1,), IS_CHANGED=classmethod(broken))
    bench = Bench(classes={"Broken": kind})
    prompt = {"1": make("Broken"), "2": make("Show", value=["1", 0])}
    bench.run(prompt)
    bench.run(prompt)
    assert bench.executor.success
    assert len(Show.calls) == 2


# --- lazy inputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [True, False])
def test_only_the_branch_that_is_needed_runs(bench: Bench, which: bool) -> None:
    prompt = {
        "yes": make("Number", value=1),
        "no": make("Number", value=2),
        "switch": make("Switch", which=which, yes=["yes", 0], no=["no", 0]),
        "show": make("Show", value=["switch", 0]),
    }
    expected = 1 if which else 2
    assert bench.values(bench.run(prompt)) == {"show": [expected]}
    assert Number.calls == [expected]


def test_a_lazy_node_shows_its_start_again_when_it_resumes() -> None:
    bench = Bench()
    prompt = {
        "1": make("Number", value=1),
        "2": make("Switch", which=True, yes=["1", 0], no=0),
        "3": make("Show", value=["2", 0]),
    }
    bench.run(prompt)
    assert [data["node"] for data in bench.sink.named("executing")] == ["2", "1", "2", "3"]


def test_asking_for_an_input_that_is_not_there_is_an_error() -> None:
    kind = node(
        "Asks", {"required": {"a": ("INT", {"lazy": True})}}, run=lambda self, a: (a,),
        check_lazy_status=lambda self, **_: ["nothing"],
    )  # fmt: skip
    bench = Bench(classes={"Asks": kind})
    bench.run({"1": make("Asks", a=1), "2": make("Show", value=["1", 0])})
    assert "nothing" in bench.error["exception_message"]


# --- failure --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom"), SystemExit(3), KeyboardInterrupt(), RecursionError("deep"),
        MemoryError(), GeneratorExit(), BaseException("bare"),
    ],
)  # fmt: skip
def test_whatever_a_node_raises_fails_the_prompt_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    bench = Bench()
    monkeypatch.setattr(Fail, "error", error)
    prompt = {
        "1": make("Number", value=1),
        "2": make("Fail", value=["1", 0]),
        "3": make("Show", value=["2", 0]),
    }
    bench.run(prompt)
    assert not bench.executor.success
    assert bench.error["node_id"] == "2"
    assert bench.error["node_type"] == "Fail"
    assert bench.error["exception_type"] == type(error).__name__
    assert bench.error["current_inputs"] == {"value": [1]}
    bench.run(SUM)
    assert bench.executor.success


def test_an_async_node_that_exits_fails_its_prompt_only() -> None:
    async def run(self: Any) -> tuple[int]:
        raise SystemExit(1)

    bench = Bench(classes={"Exit": node("Exit", run=run)})
    bench.run({"1": make("Exit"), "2": make("Show", value=["1", 0])})
    assert bench.error["exception_type"] == "SystemExit"
    bench.run(SUM)
    assert bench.executor.success


def test_outputs_made_before_a_failure_are_kept() -> None:
    bench = Bench()
    prompt = SUM | {"4": make("Fail", value=["3x", 0]), "3x": make("Add", a=["2", 0], b=1)}
    prompt["5"] = make("Show", value=["4", 0])
    result = bench.run(prompt)
    assert not bench.executor.success
    assert bench.values(result) == {"3": [7]}


def test_a_failed_node_runs_again_and_its_sources_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    prompt = {
        "1": make("Number", value=1),
        "2": make("Fail", value=["1", 0]),
        "3": make("Show", value=["2", 0]),
    }
    bench.run(prompt)
    monkeypatch.setattr(Fail, "run", lambda self, value: (value,))
    assert bench.values(bench.run(prompt)) == {"3": [1]}
    assert Number.calls == [1]


def test_the_error_lets_go_of_what_the_frames_held() -> None:
    import gc
    import weakref

    class Tensor:
        pass

    alive: list[Any] = []

    def run(self: Any) -> tuple[Any]:
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        raise ValueError("with a tensor in the frame")

    bench = Bench(classes={"Holds": node("Holds", run=run)})
    bench.run({"1": make("Holds"), "2": make("Show", value=["1", 0])})
    gc.collect()
    assert alive[0]() is None


def test_the_memory_hook_says_what_people_see() -> None:
    bench = Bench(oom_hook=lambda error: "use a smaller picture")
    bench.run({"1": make("Fail", value=1), "2": make("Show", value=["1", 0])})
    assert bench.error["exception_message"] == "use a smaller picture\n"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "The disk is full"),
        (errno.EACCES, "mend its permissions"),
        (errno.ENAMETOOLONG, "shorten it"),
        (errno.ECONNREFUSED, ""),
    ],
)
def test_a_refusal_of_the_system_says_how_to_mend_it(number: int, advice: str) -> None:
    def run(self: Any) -> tuple[Any]:
        raise OSError(number, os.strerror(number), "/some/file")

    bench = Bench(classes={"Writes": node("Writes", run=run)})
    bench.run({"1": make("Writes"), "2": make("Show", value=["1", 0])})
    said, _, mend = bench.error["exception_message"].partition("\n")
    assert "/some/file" in said
    assert advice in mend
    assert bool(mend) == bool(advice)


def test_a_node_that_was_given_nothing_names_the_input() -> None:
    def give(self: Any) -> tuple[Any]:
        return (None,)

    def use(self: Any, clip: Any) -> tuple[Any]:
        return (clip.encode(),)

    typed = {"required": {"clip": ("CLIP",)}}
    bench = Bench(
        classes={
            "Gives": node("Gives", run=give, RETURN_TYPES=("CLIP",)),
            "Uses": node("Uses", run=use, inputs=typed),
        }
    )
    bench.run(
        {"1": make("Gives"), "2": make("Uses", clip=["1", 0]), "3": make("Show", value=["2", 0])}
    )
    assert bench.error["exception_message"].startswith("clip: expected a value, found none")
    assert "attribute" not in bench.error["exception_message"]
    assert "no attribute 'encode'" in bench.error["traceback"][-1]


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, lambda tensor: {"samples": tensor}])
def test_a_node_that_was_given_an_empty_tensor_names_the_input(wrap: Any) -> None:
    class Tensor:
        shape = (1, 0, 64, 3)

    def use(self: Any, image: Any) -> tuple[Any]:
        raise RuntimeError("sizes should be greater than 0")

    typed = {"required": {"image": ("IMAGE",)}}
    gives = node("Gives", run=lambda self: (wrap(Tensor()),), RETURN_TYPES=("IMAGE",))
    bench = Bench(classes={"Gives": gives, "Uses": node("Uses", run=use, inputs=typed)})
    uses, shows = make("Uses", image=["1", 0]), make("Show", value=["2", 0])
    bench.run({"1": make("Gives"), "2": uses, "3": shows})
    assert bench.error["exception_message"].startswith("image: expected something with content")
    assert "(1, 0, 64, 3)" in bench.error["exception_message"]
    assert bench.error["traceback"][-1] == "RuntimeError: sizes should be greater than 0\n"


def test_a_memory_hook_that_fails_does_not_hide_the_failure() -> None:
    def fail(_: BaseException) -> str:
        raise ValueError("no advice")

    bench = Bench(oom_hook=fail)
    bench.run({"1": make("Fail", value=1), "2": make("Show", value=["1", 0])})
    assert bench.error["node_id"] == "1"
    assert bench.error["exception_message"].strip() == "boom"


def test_a_slot_that_was_not_returned_is_an_error_that_names_it() -> None:
    short = node("Short", RETURN_TYPES=("INT", "INT"), run=lambda self: (1,))
    bench = Bench(classes={"Short": short})
    bench.run({"1": make("Short"), "2": make("Show", value=["1", 1])})
    for part in ("output 1", "node 1", "returned 1 outputs"):
        assert part in bench.error["exception_message"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_a_ui_value_json_cannot_carry_is_an_error_of_its_node(value: Any) -> None:
    shows = node("Shows", OUTPUT_NODE=True, run=lambda self: {"ui": {"number": [value]}})
    bench = Bench(classes={"Shows": shows})
    bench.run({"1": make("Shows")})
    assert bench.error["node_id"] == "1"
    assert "ui value 'number'" in bench.error["exception_message"]


@pytest.mark.parametrize("returned", [None, 5])
def test_a_result_that_is_no_tuple_is_an_error(returned: Any) -> None:
    bench = Bench(classes={"Odd": node("Odd", run=lambda self: returned)})
    bench.run({"1": make("Odd"), "2": make("Show", value=["1", 0])})
    assert "expected a tuple of 1 values" in bench.error["exception_message"]


# --- blocking -------------------------------------------------------------------------------------


def test_a_blocker_silences_what_lies_downstream(bench: Bench) -> None:
    bench.registry.classes["Block"] = node("Block", run=lambda self: (ExecutionBlocker(None),))  # type: ignore[index]
    result = bench.run({"1": make("Block"), "2": make("Show", value=["1", 0])})
    assert bench.executor.success
    assert result["outputs"] == {}
    assert Show.calls == []


def test_a_blocker_message_is_shown_once_at_the_first_consumer() -> None:
    bench = Bench(classes={"Block": node("Block", run=lambda self: ExecutionBlocker("no way"))})
    prompt = {
        "1": make("Block"),
        "2": make("Add", a=["1", 0], b=1),
        "3": make("Show", value=["2", 0]),
    }
    bench.run(prompt)
    errors = bench.sink.named("execution_error")
    assert [error["node_id"] for error in errors] == ["2"]
    assert errors[0]["exception_message"] == "Execution Blocked: no way"
    assert "timestamp" not in errors[0]
    assert bench.executor.success
    assert [name for name, _ in bench.executor.status_messages][-1] == "execution_success"


def test_one_blocked_item_of_a_list_blocks_only_its_own_call() -> None:
    mixed = node(
        "Mixed", OUTPUT_IS_LIST=(True,), run=lambda self: ([1, ExecutionBlocker(None), 3],)
    )
    bench = Bench(classes={"Mixed": mixed})
    prompt = {
        "1": make("Mixed"),
        "2": make("Add", a=["1", 0], b=10),
        "3": make("Show", value=["2", 0]),
    }
    assert bench.values(bench.run(prompt)) == {"3": [11, 13]}


# --- async ----------------------------------------------------------------------------------------


def test_async_nodes_run_side_by_side(bench: Bench) -> None:
    Slow.running = Slow.most_running = 0
    prompt = {f"s{i}": make("Slow", value=i, turns=5) for i in range(4)}
    prompt |= {f"o{i}": make("Show", value=[f"s{i}", 0]) for i in range(4)}
    result = bench.run(prompt)
    assert Slow.most_running == 4
    assert bench.values(result) == {f"o{i}": [i] for i in range(4)}


def test_a_waiting_async_node_does_not_hold_up_others() -> None:
    bench = Bench()
    prompt = {
        "slow": make("Slow", value=1, turns=50),
        "a": make("Show", value=["slow", 0]),
        **SUM,
    }
    result = bench.run(prompt, ["a", "3"])
    assert list(result["outputs"]) == ["3", "a"]


def test_an_async_node_runs_its_list_items_side_by_side() -> None:
    Slow.running = Slow.most_running = 0
    bench = Bench(classes={"Three": numbers_list(1, 2, 3)})
    prompt = {
        "1": make("Three"),
        "2": make("Slow", value=["1", 0], turns=2),
        "3": make("Show", value=["2", 0]),
    }
    assert bench.values(bench.run(prompt)) == {"3": [1, 2, 3]}
    assert Slow.most_running == 3


def test_an_async_node_sees_exceptions_and_results_of_what_it_awaits() -> None:
    import asyncio

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("inner")

    async def run(self: Any) -> tuple[str]:
        try:
            await asyncio.gather(fails(), asyncio.sleep(0))
        except KeyError as error:
            found = await asyncio.wait_for(asyncio.sleep(0, "value"), 5)
            return (f"{error.args[0]} {found}",)
        return ("nothing",)

    bench = Bench(classes={"Catches": node("Catches", run=run)})
    result = bench.run({"1": make("Catches"), "2": make("Show", value=["1", 0])})
    assert bench.values(result) == {"2": ["inner value"]}


def test_an_async_failure_stops_the_other_tasks() -> None:
    bench = Bench()

    async def fails(self: Any) -> tuple[int]:
        import asyncio

        await asyncio.sleep(0)
        raise ValueError("late")

    bench.registry.classes["Late"] = node("Late", run=fails)  # type: ignore[index]
    prompt = {
        "slow": make("Slow", value=1, turns=100000),
        "late": make("Late"),
        "a": make("Show", value=["slow", 0]),
        "b": make("Show", value=["late", 0]),
    }
    bench.run(prompt)
    assert bench.error["node_id"] == "late"
    assert Slow.calls == []


# --- interruption ---------------------------------------------------------------------------------


def test_an_interruption_stops_before_the_next_call() -> None:
    bench = Bench()

    def run(self: Any) -> tuple[int]:
        bench.flag.set()
        return (1,)

    bench.registry.classes["Stops"] = node("Stops", run=run)  # type: ignore[index]
    prompt = {
        "1": make("Stops"),
        "2": make("Add", a=["1", 0], b=1),
        "3": make("Show", value=["2", 0]),
    }
    bench.run(prompt)
    name, data = bench.executor.status_messages[-1]
    assert name == "execution_interrupted"
    assert (data["node_id"], data["node_type"], data["executed"]) == ("2", "Add", ["1"])
    assert not bench.executor.success
    bench.run(SUM)
    assert bench.executor.success


def test_an_interruption_reaches_a_waiting_async_node() -> None:
    bench = Bench()

    async def run(self: Any) -> tuple[int]:
        import asyncio

        await asyncio.sleep(60)
        return (1,)

    bench.registry.classes["Waits"] = node("Waits", run=run)  # type: ignore[index]
    threading.Timer(0.02, bench.flag.set).start()
    bench.run({"1": make("Waits"), "2": make("Show", value=["1", 0])})
    assert bench.executor.status_messages[-1][0] == "execution_interrupted"


def test_an_exception_raised_because_of_an_interruption_counts_as_one() -> None:
    bench = Bench()

    def run(self: Any) -> tuple[int]:
        try:
            raise bench.flag.exception
        except BaseException as error:
            raise RuntimeError("cleaned up") from error

    bench.registry.classes["Wraps"] = node("Wraps", run=run)  # type: ignore[index]
    bench.run({"1": make("Wraps"), "2": make("Show", value=["1", 0])})
    assert bench.executor.status_messages[-1][0] == "execution_interrupted"


# --- the graph itself -----------------------------------------------------------------------------


def test_a_link_to_a_missing_node_is_an_error_not_a_crash() -> None:
    bench = Bench()
    bench.run({"1": make("Show", value=["nowhere", 0])})
    assert "nowhere" in bench.error["exception_message"]


def test_a_cycle_is_an_error_that_names_its_nodes() -> None:
    bench = Bench()
    prompt = {
        "1": make("Add", a=["2", 0], b=1),
        "2": make("Add", a=["1", 0], b=1),
        "3": make("Show", value=["2", 0]),
    }
    bench.run(prompt)
    assert bench.error["exception_type"].endswith("DependencyCycleError")
    assert bench.error["node_id"] in ("1", "2")


@pytest.mark.parametrize("count", [5000])
def test_a_long_chain_and_a_wide_fan_do_not_recurse(bench: Bench, count: int) -> None:
    prompt = {"n0": make("Number", value=0)}
    prompt |= {f"n{i}": make("Add", a=[f"n{i - 1}", 0], b=1) for i in range(1, count)}
    prompt["show"] = make("Show", value=[f"n{count - 1}", 0])
    assert bench.values(bench.run(prompt)) == {"show": [count - 1]}


def test_two_thousand_inputs_of_one_node() -> None:
    names = [f"x{i}" for i in range(2000)]
    wide = node("Wide", spec_free(*names), run=lambda self, **values: (sum(values.values()),))
    bench = Bench(classes={"Wide": wide})
    prompt = {name: make("Number", value=i) for i, name in enumerate(names)}
    prompt["wide"] = make("Wide", **{name: [name, 0] for name in names})
    prompt["show"] = make("Show", value=["wide", 0])
    assert bench.values(bench.run(prompt)) == {"show": [sum(range(2000))]}


def test_the_graph_builder_names_nodes_after_the_running_one() -> None:
    seen: list[str] = []

    def run(self: Any) -> tuple[int]:
        seen.append(GraphBuilder().node("Number").id)
        seen.append(GraphBuilder().node("Number").id)
        return (1,)

    bench = Bench(classes={"Builds": node("Builds", run=run)})
    bench.run({"7": make("Builds"), "2": make("Show", value=["7", 0])})
    assert seen == ["7.0.0.1", "7.0.1.1"]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ({"ui": ["shown"], "result": (1,)}, "returned a list as ui; expected a dict of lists"),
        ({"ui": "shown"}, "returned a str as ui"),
        ({"expand": ["x"], "result": (1,)}, "something else than a graph as expand"),
        ({"expand": {"x": 5}, "result": (1,)}, "something else than a graph as expand"),
        ({"expand": {"x": {"inputs": {}}}, "result": (1,)}, "something else than a graph"),
    ],
)
def test_a_malformed_result_is_explained(returned: Any, expected: str) -> None:
    bench = Bench(classes={"Odd": node("Odd", run=lambda _: returned)})
    bench.run({"1": make("Odd"), "2": make("Show", value=["1", 0])})
    assert bench.error["node_id"] == "1"
    assert expected in bench.error["exception_message"]


class FakeTensor:
    """As much of a tensor as errors look at."""

    dtype = "torch.float32"

    def __init__(self, *shape: int) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("IMAGE", FakeTensor(64, 64), r"pictures \[batch.*shape \(64, 64\) and type torch.float32"),
        ("MASK", FakeTensor(64), r"masks \[batch, height, width\], found a tensor.*\(64,\)"),
        ("LATENT", {"samples": FakeTensor(8, 8)}, r"a latent.*'samples': tensor \(8, 8\)"),
        ("LATENT", FakeTensor(1, 4, 8, 8), "a latent.*found a tensor"),
        ("CONDITIONING", [[None, {}]], "conditioning: a list.*found a list of 1 "),
        ("SIGMAS", [1.0], r"noise levels \[steps \+ 1\], found a list of 1 \(float\)"),
        ("IMAGE,MASK", FakeTensor(4), r"pictures .* or masks .*shape \(4,\)"),
        ("MODEL", "sd15", "a model, found the text 'sd15'"),
        ("VAE", 5, "an autoencoder, found the number 5"),
        ("VAE", False, "an autoencoder, found False"),
    ],
)  # fmt: skip
def test_what_is_not_of_the_declared_kind_is_named_with_what_was_found(
    kind: str, value: Any, words: str
) -> None:
    def use(self: Any, given: Any) -> tuple[Any]:
        return (given.no_such_thing,)

    gives = node("Gives", run=lambda self: (value,), RETURN_TYPES=(kind,))
    uses = node("Uses", run=use, inputs={"required": {"given": (kind,)}})
    bench = Bench(classes={"Gives": gives, "Uses": uses})
    graph = {"1": make("Gives"), "2": make("Uses", given=["1", 0])}
    bench.run({**graph, "3": make("Show", value=["2", 0])})
    message = bench.error["exception_message"]
    assert re.match(rf"given: expected {words}", message), message
    assert "attribute" not in message
    assert "has no attribute 'no_such_thing'" in bench.error["traceback"][-1]


def test_a_refusal_in_a_node_s_own_words_is_left_alone() -> None:
    def use(self: Any, given: Any) -> tuple[Any]:
        raise ValueError("give me something else")

    gives = node("Gives", run=lambda self: ("ünï",), RETURN_TYPES=("IMAGE",))
    uses = node("Uses", run=use, inputs={"required": {"given": ("IMAGE",)}})
    bench = Bench(classes={"Gives": gives, "Uses": uses})
    graph = {"1": make("Gives"), "2": make("Uses", given=["1", 0])}
    bench.run({**graph, "3": make("Show", value=["2", 0])})
    assert bench.error["exception_message"].strip() == "give me something else"
