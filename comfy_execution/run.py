"""One prompt on its way through the executor, node by node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from comfy_execution import calls
from comfy_execution.caching import CacheEntry, CacheSet, Ownership
from comfy_execution.calls import Call, Outcome, read_results
from comfy_execution.context import ExecutionContext, set_executing_context
from comfy_execution.events import EventSink
from comfy_execution.failures import Failure, describe_failure
from comfy_execution.graph import DynamicPrompt, ExecutionList, NodeInputError
from comfy_execution.graph_utils import ExecutionBlocker, is_link
from comfy_execution.inputs import InputLists, gather_inputs, hidden_values, take_output
from comfy_execution.privacy import Watch
from comfy_execution.progress import ProgressRegistry
from comfy_execution.records import RunRecord
from comfy_execution.registry import SpecTable
from comfy_execution.results import RunResults
from comfy_execution.run_hooks import RunHooks
from comfy_execution.showing import Showing
from comfy_execution.signatures import Signatures
from comfy_execution.spec import NodeSpec
from comfy_execution.text_limit import TextBudget


class ExecutionResult(Enum):
    """What became of one attempt to run a node."""

    SUCCESS = 0
    FAILURE = 1
    PENDING = 2


StepResult = tuple[ExecutionResult, "Failure | None", "BaseException | None"]

DONE: StepResult = (ExecutionResult.SUCCESS, None, None)
WAIT: StepResult = (ExecutionResult.PENDING, None, None)


@dataclass(slots=True)
class _Started:
    """A node that was called and whose tasks are not done."""

    results: list[Any]
    inputs: InputLists
    unblock: Callable[[], None]


@dataclass(slots=True)
class _Expanded:
    """A node that waits for nodes of its expanded graph."""

    calls: list[tuple[dict[str, Any] | None, Any]]
    held: list[str]


@dataclass
class PromptRun:
    """State of one running prompt.

    Attributes:
        executed: Nodes that ran to their end, in order.
        expanded: Nodes that put a graph in their place.
        expanded_entries: The results of those among them that have one.
    """

    prompt_id: str
    prompt: DynamicPrompt
    specs: SpecTable
    signatures: Signatures
    caches: CacheSet
    sink: EventSink
    extra_data: dict[str, Any]
    hooks: RunHooks
    progress: ProgressRegistry
    record: RunRecord
    note_changes: Callable[[list[str]], Awaitable[None]]
    executed: dict[str, None] = field(default_factory=dict)
    expanded: set[str] = field(default_factory=set)
    expanded_entries: dict[str, CacheEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        release = not self.caches.outputs.keeps_run
        self.results = RunResults(self.prompt, self.specs, release=release)
        self.pending = ExecutionList(self.prompt, self.specs, self.is_known)
        self.started: dict[str, _Started] = {}
        self.waiting: dict[str, _Expanded] = {}
        client_id = self.extra_data.get("client_id")
        self.showing = Showing(self.prompt_id, self.prompt, self.sink, client_id)
        self._inputs: InputLists = {}
        self._watch = Watch(self.hooks.privacy)
        self._texts = TextBudget()

    def close(self) -> None:
        """The prompt has ended: lets go of results at once, not when cycles are collected."""
        self.results.clear()
        self.started.clear()
        self.waiting.clear()
        self.expanded_entries.clear()
        self._inputs = {}
        self.progress.close()

    # --- results ------------------------------------------------------------------------------

    def is_known(self, node_id: str) -> bool:
        """Whether a node has a result, from this run or from the cache."""
        return self.lookup(node_id) is not None

    def lookup(self, node_id: str) -> CacheEntry | None:
        """The result of a node; one found in the cache is held for this run from now on."""
        entry = self.results.get(node_id)
        if entry is None and node_id not in self.waiting and node_id not in self.started:
            entry = self._from_cache(node_id)
            if entry is not None:
                self.results.put(node_id, entry)
                self.showing.found_cached(node_id, entry)
        return entry

    def _from_cache(self, node_id: str) -> CacheEntry | None:
        if not self.prompt.has_node(node_id):
            return None
        signature = self.signatures.get(node_id)
        entry = self.caches.outputs.get(signature)
        if entry is None or entry.ui is None or self.hooks.ui_is_valid(entry.ui):
            return entry
        self.caches.outputs.discard(signature)
        return None

    # --- one step -----------------------------------------------------------------------------

    async def step(self, node_id: str) -> StepResult:
        """Runs a staged node as far as it goes now. Catches whatever it raises."""
        self._inputs = {}
        self.showing.show_children_again()
        try:
            return await self._step(node_id)
        except BaseException as error:  # noqa: BLE001 - a node may raise anything, even SystemExit
            self.hooks.guard.leave()
            class_type = self.prompt.get_node(node_id)["class_type"]
            self.record.finish(node_id, class_type, self.hooks.peak_memory, failed=True)
            if self.hooks.is_interruption(error):
                return ExecutionResult.FAILURE, Failure(node_id, interrupted=True), error
            failure = describe_failure(
                node_id, error, self._inputs, self.hooks.memory_text, self._types_of(node_id)
            )
            return ExecutionResult.FAILURE, failure, error

    def _types_of(self, node_id: str) -> dict[str, Any]:
        """Declared types of the inputs of the node that was called last, if it was called."""
        if not self._inputs:
            return {}
        node = self.prompt.get_node(node_id)
        spec = self.specs[node["class_type"]]
        given = node.get("inputs") or {}
        return {name: spec.find(name, given).type for name in self._inputs}

    async def _step(self, node_id: str) -> StepResult:
        entry = self.lookup(node_id)
        if entry is not None:
            self._show_cached(node_id, entry)
            return DONE
        node = self.prompt.get_node(node_id)
        spec = self.specs[node["class_type"]]
        if node_id in self.waiting:
            return self._finish(node_id, spec, self._join_expanded(node_id, spec))
        if node_id in self.started:
            started = self.started.pop(node_id)
            self._inputs = started.inputs
            results = [r.result() if isinstance(r, asyncio.Future) else r for r in started.results]
            outcome = read_results(results, spec)
        else:
            called = await self._call(node_id, node, spec)
            if called is None:
                return WAIT
            outcome = called
        if outcome.ui:
            self.showing.show(node_id, outcome.ui)
        if outcome.subgraphs is not None:
            await self._expand(node_id, outcome.subgraphs)
            return WAIT
        self._texts.take(outcome.outputs)
        return self._finish(node_id, spec, outcome.outputs)

    async def _call(self, node_id: str, node: dict[str, Any], spec: NodeSpec) -> Outcome | None:
        """Calls a node; None if it has to wait for lazy inputs or for its own tasks."""
        self.record.start(node_id)
        self._watch.called(node_id)
        self.progress.start_progress(node_id)
        gathered = gather_inputs(node_id, node, spec, self.lookup)
        self._require_results(node_id, node, spec, gathered.missing)
        self._inputs = values = dict(gathered.values)
        self.hooks.see_inputs(values)
        self.showing.executing(node_id)
        hidden = hidden_values(spec, node_id, self.prompt, self.extra_data)
        instance = self._instance(node_id, spec)
        bound = spec.bind(instance, hidden, node.get("inputs") or {})
        if spec.hidden_as_arguments and hidden:
            values = values | {name: [value] for name, value in hidden.items()}
        call = Call(spec, bound, self.hooks.guard)
        if spec.lazy_check is not None and await self._wants_more(
            node_id, call, values, gathered.missing
        ):
            return None
        outputs, ui, has_subgraph, has_tasks = await calls.get_output_data(
            self.prompt_id, node_id, instance, values,
            lambda found: self.showing.blocked(node_id, spec.class_type, found, self.executed),
            lambda index: self._before_call(node_id, index), call,
        )  # fmt: skip
        if has_tasks:
            self._follow_tasks(node_id, outputs)
            return None
        if has_subgraph:
            return Outcome(ui=ui, subgraphs=outputs)
        return Outcome(outputs, ui)

    @staticmethod
    def _require_results(
        node_id: str, node: dict[str, Any], spec: NodeSpec, missing: set[str]
    ) -> None:
        """Only lazy inputs may be missing: any other would reach the node as None."""
        for name in missing:
            link = node["inputs"][name]
            assert spec.link_info(name, node["inputs"]).options.get("lazy"), (
                f"node {node_id} was called without the result of node {link[0]} for {name!r}"
            )

    def _before_call(self, node_id: str, index: int) -> None:
        set_executing_context(ExecutionContext(self.prompt_id, node_id, index))

    def _instance(self, node_id: str, spec: NodeSpec) -> Any:
        objects = self.caches.objects
        instance = objects.get(node_id, spec.class_type, spec.node_class)
        if instance is None:
            set_executing_context(ExecutionContext(self.prompt_id, node_id))
            instance = calls.guarded(spec.make_instance, {}, self.hooks.guard)
            owner = self.prompt.get_real_node_id(node_id)
            objects.put(node_id, spec.class_type, spec.node_class, instance, owner)
        return instance

    async def _wants_more(
        self, node_id: str, call: Call, values: InputLists, missing: set[str]
    ) -> bool:
        """Asks a node which of its lazy inputs it needs now, and makes it wait for those."""
        assert call.spec.lazy_check is not None
        answers = await calls._async_map_node_over_list(
            self.prompt_id, node_id, call.bound.target, values, call.spec.lazy_check, True,
            None, lambda index: self._before_call(node_id, index), call,
        )  # fmt: skip
        done = [await a if isinstance(a, asyncio.Future) else a for a in answers]
        wanted = {name for names in done if isinstance(names, (list, tuple, set)) for name in names}
        wanted = {name for name in wanted if name not in values or name in missing}
        for name in sorted(wanted):
            self.pending.make_input_strong_link(node_id, name)
        return bool(wanted)

    # --- async nodes --------------------------------------------------------------------------

    def _follow_tasks(self, node_id: str, results: list[Any]) -> None:
        """Lets a node wait for its own tasks while others run."""
        unblock = self.pending.add_external_block(node_id)
        self.started[node_id] = _Started(results, self._inputs, unblock)
        tasks = [result for result in results if isinstance(result, asyncio.Future)]
        left = len(tasks)

        def on_done(task: asyncio.Future[Any]) -> None:
            nonlocal left
            left -= 1
            failed = not task.cancelled() and task.exception() is not None
            if (left == 0 or failed) and node_id in self.started:
                self.started[node_id].unblock()
                self.started[node_id].unblock = lambda: None

        for task in tasks:
            task.add_done_callback(on_done)

    def unfinished_tasks(self) -> list[asyncio.Future[Any]]:
        """Tasks of async nodes that still run."""
        return [
            result
            for started in self.started.values()
            for result in started.results
            if isinstance(result, asyncio.Future) and not result.done()
        ]

    # --- expansion ----------------------------------------------------------------------------

    async def _expand(
        self, node_id: str, subgraphs: list[tuple[dict[str, Any] | None, Any]]
    ) -> None:
        """Adds the graphs a node returned, and makes it wait for those of their nodes it needs."""
        added: list[str] = []
        for graph, _ in subgraphs:
            for new_id, new_node in (graph or {}).items():
                display_id = new_node.get("override_display_id", node_id)
                self.prompt.add_ephemeral_node(new_id, new_node, node_id, display_id)
                added.append(new_id)
        await self.note_changes(added)
        self.expanded.add(node_id)
        self._watch.expanded(node_id, [self.prompt.get_node(name)["class_type"] for name in added])
        links = [
            value for graph, values in subgraphs if graph is not None
            for value in values or () if is_link(value)
        ]  # fmt: skip
        outputs = [
            new_id
            for new_id in added
            if self.specs[self.prompt.get_node(new_id)["class_type"]].is_output
        ]
        held = [link[0] for link in links]
        self.results.expect([*outputs, *held], self.is_known)
        self.results.has_read(node_id)
        self.waiting[node_id] = _Expanded(subgraphs, held)
        for new_id in outputs:
            self.pending.add_node(new_id)
        for link in links:
            self.pending.add_strong_link(link[0], link[1], node_id)

    def _join_expanded(self, node_id: str, spec: NodeSpec) -> list[list[Any]]:
        """The outputs of an expanded node: values it gave itself, and results of its graph."""
        expanded = self.waiting.pop(node_id)
        count = max((len(values) for _, values in expanded.calls if values is not None), default=0)
        outputs: list[list[Any]] = [[] for _ in range(count)]
        for graph, values in expanded.calls:
            for index, value in enumerate(values if values is not None else ()):
                is_from_graph = graph is not None and is_link(value)
                if not is_from_graph:  # results of its graph were counted when they were made
                    self._texts.take([[value]])
                if is_from_graph:
                    entry = self.lookup(value[0])
                    if entry is None:
                        raise NodeInputError(
                            f"node {node_id} expanded into a graph whose node {value[0]} has no "
                            "result"
                        )
                    found = take_output(entry, value, f"output {index} of node {node_id}")
                    outputs[index] += _spread(found) if spec.returns_list(index) else found
                elif spec.returns_list(index) and not isinstance(value, ExecutionBlocker):
                    outputs[index] += value
                else:
                    outputs[index].append(value)
        for held in expanded.held:
            self.results.let_go(held)
        return outputs

    # --- the end of a node --------------------------------------------------------------------

    def _show_cached(self, node_id: str, entry: CacheEntry) -> None:
        self.showing.show_cached(node_id, entry)
        self.record.cached(node_id)
        self.progress.finish_progress(node_id)

    def _finish(self, node_id: str, spec: NodeSpec, outputs: list[list[Any]]) -> StepResult:
        if self._watch.ended(node_id, spec.class_type):
            self.signatures.forget()
        shown = self.showing.ui_outputs.get(node_id)
        entry = CacheEntry(outputs, shown["output"] if shown is not None else None)
        self.results.put(node_id, entry)
        if node_id in self.expanded:
            self.expanded_entries[node_id] = entry
        is_expanded = self.prompt.get_parent_node_id(node_id) is not None
        owner = Ownership(self.prompt.get_real_node_id(node_id), is_expanded)
        self.caches.outputs.put(self.signatures.get(node_id), entry, owner)
        self.executed[node_id] = None
        self.record.finish(node_id, spec.class_type, self.hooks.peak_memory)
        self.progress.finish_progress(node_id)
        return DONE


current_run: ContextVar[PromptRun | None] = ContextVar("current_run", default=None)
"""The run that the public ``execute`` belongs to."""


def _spread(values: list[Any]) -> list[Any]:
    """Values of a list output: one that is itself a list stands for its items."""
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        return list(values[0])
    return values
