"""Running prompts: from the graph to history, events and cached results.

``PromptExecutor.execute`` runs one prompt in the calling thread, on an event loop of its own so
that async nodes run side by side. It is given everything it works with and never raises for what a
node did: the outcome is in ``success``, ``status_messages`` and ``history_result``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from comfy_execution import events
from comfy_execution.breaker import CallGuard, ForcedInterruption
from comfy_execution.caching import CacheSet
from comfy_execution.changes import note_change
from comfy_execution.context import interrupt_check
from comfy_execution.failures import Failure, describe_failure
from comfy_execution.graph import DependencyCycleError, DynamicPrompt, needed_nodes
from comfy_execution.items import ExecutionStatus
from comfy_execution.options import ExecutionInterrupt, ExecutorOptions, NoInterrupt
from comfy_execution.progress import ProgressRegistry, reset_progress_state
from comfy_execution.records import RunRecord
from comfy_execution.registry import Registry, SpecTable
from comfy_execution.run import ExecutionResult, PromptRun, StepResult, current_run
from comfy_execution.run_hooks import RunHooks
from comfy_execution.signatures import Parts, Signatures

__all__ = ["ExecutorOptions", "PromptExecutor", "execute"]

logger = logging.getLogger(__name__)

MOST_EXPANDED_NAMED = 1000  # in an error; a loop of many turns would make it megabytes long
POLL_S = 0.02  # how often an interruption is looked for while only async nodes run


class PromptExecutor:
    """Runs prompts one after the other in one thread.

    Attributes:
        caches: Results and node instances kept between prompts.
        success: Whether the last prompt succeeded.
        status_messages: (event name, data) of the last prompt's start, cache and end.
        history_result: ``outputs``, ``meta``, ``nodes`` and ``environment`` of the last prompt.
        guard: For a ``Breaker`` that stops nodes which do not look.
        announces_end: Whether ``execute`` sends a prompt's last message itself. A worker puts the
            prompt on record first: who hears of its end may ask for its results at once.
    """

    def __init__(
        self,
        registry: Registry,
        sink: events.EventSink | None = None,
        interrupt: ExecutionInterrupt | None = None,
        options: ExecutorOptions | None = None,
    ) -> None:
        self.registry = registry
        self.server: events.EventSink = sink or events.NullSink()
        self.interrupt: ExecutionInterrupt = interrupt or NoInterrupt()
        self.options = options or ExecutorOptions()
        self.guard = CallGuard()
        self.announces_end = True
        self._end: events.Event | None = None
        self.caches = CacheSet(self.options.cache)
        self._previous_parts: dict[str, Parts] = {}
        self._client_id: str | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets every cached result and node instance, and the last prompt's outcome."""
        self.caches.clear()
        self._previous_parts = {}
        self.success = True
        self.status_messages: list[tuple[str, dict[str, Any]]] = []
        self.history_result: dict[str, Any] = {"outputs": {}, "meta": {}}

    @property
    def status(self) -> ExecutionStatus:
        """How the last prompt ended, for the history."""
        return ExecutionStatus(
            "success" if self.success else "error", self.success, list(self.status_messages)
        )

    def execute(
        self,
        prompt: dict[str, Any],
        prompt_id: str,
        extra_data: Mapping[str, Any] | None = None,
        execute_outputs: Sequence[str] = (),
    ) -> None:
        """Runs a validated prompt.

        Args:
            prompt: Node id -> node.
            prompt_id: Its id.
            extra_data: What was posted with it, secrets included.
            execute_outputs: Ids of the output nodes to run.
        """
        run = self.execute_async(prompt, prompt_id, extra_data, execute_outputs)
        loop = asyncio.new_event_loop()
        try:
            with self.options.run_context():
                loop.run_until_complete(run)
        finally:
            _close(loop)

    async def execute_async(
        self,
        prompt: dict[str, Any],
        prompt_id: str,
        extra_data: Mapping[str, Any] | None = None,
        execute_outputs: Sequence[str] = (),
    ) -> None:
        """As ``execute``, on the running event loop."""
        extra = dict(extra_data or {})
        self._begin(extra)
        interrupt_check.set(self._raise_if_interrupted)
        self._send(events.ExecutionStart(prompt_id, events.now_ms(), self._client_id))
        run: PromptRun | None = None
        try:
            run = await self._prepare(prompt, prompt_id, extra, execute_outputs)
            await self._run(run, execute_outputs)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the worker must live
            self._fail(prompt_id, error)
        finally:
            if run is not None:
                await self._wind_up(run)
                run.close()
        if self.announces_end:
            self.announce_end()

    def abandon(self, prompt_id: str, extra_data: Mapping[str, Any], error: BaseException) -> None:
        """Ends a prompt that could not be started, or whose execution itself broke down."""
        self._begin(extra_data)
        self._fail(prompt_id, error)
        if self.announces_end:
            self.announce_end()

    def announce_end(self) -> None:
        """Sends the last prompt's last message, unless that was done."""
        end, self._end = self._end, None
        if end is not None:
            self.server.publish(end)

    # --- the course of a prompt ---------------------------------------------------------------

    def _begin(self, extra_data: Mapping[str, Any]) -> None:
        self._client_id = extra_data.get("client_id")
        self.status_messages = []
        self.history_result = {"outputs": {}, "meta": {}}
        self.success = True
        self._end = None

    def _fail(self, prompt_id: str, error: BaseException) -> None:
        """Reports a failure that belongs to no node, or an interruption before the first one."""
        self.guard.leave()
        if isinstance(error, (self.interrupt.exception, ForcedInterruption)):
            stopped = Failure("", interrupted=True)
            self.handle_execution_error(prompt_id, {}, (), (), stopped, error)
            return
        logger.error("prompt %s failed outside of its nodes", prompt_id, exc_info=error)
        failure = describe_failure("", error, {})
        self.handle_execution_error(prompt_id, {}, (), (), failure, error)

    async def _prepare(
        self,
        prompt: dict[str, Any],
        prompt_id: str,
        extra: dict[str, Any],
        outputs: Sequence[str],
    ) -> PromptRun:
        """Builds the run: signatures of all nodes the outputs need, and what of them is cached."""
        dynprompt = DynamicPrompt(prompt)
        specs = SpecTable(self.registry)
        progress = ProgressRegistry(
            prompt_id, dynprompt, self.server, self._client_id, self._raise_in_threads
        )
        reset_progress_state(progress)
        changed: dict[str, Any] = {}
        signatures = Signatures(dynprompt, specs, changed, self.options.privacy)

        async def note_changes(node_ids: Iterable[str]) -> None:
            for node_id in node_ids:
                self._raise_if_interrupted()
                await note_change(node_id, dynprompt, specs, extra, changed, self.guard)

        needed = needed_nodes(dynprompt, outputs)
        await note_changes(needed)
        for node_id in needed:
            signatures.get(node_id)
        cache = self.caches.outputs
        cache.begin(list(signatures.known()), needed, prompt.keys())
        if not cache.keeps_objects:
            self.caches.objects.clear()
        self.caches.objects.keep_only(prompt.keys())
        hooks = RunHooks(
            (self.interrupt.exception, ForcedInterruption),
            self.options.oom_hook,
            self.options.ui_is_valid,
            self.guard,
            self.options.see_inputs,
            self.options.peak_memory,
            self.options.privacy,
        )
        record = RunRecord(self._previous_parts, signatures.parts)
        return PromptRun(
            prompt_id, dynprompt, specs, signatures, self.caches, self.server, extra, hooks,
            progress, record, note_changes,
        )  # fmt: skip

    async def _run(self, run: PromptRun, outputs: Sequence[str]) -> None:
        """Runs nodes until nothing is left, or one fails; settles how the prompt has ended."""
        cached = tuple(
            name for name in run.prompt.original_prompt
            if name in run.signatures.parts and run.is_known(name)
        )  # fmt: skip
        self._send(events.ExecutionCached(cached, run.prompt_id, events.now_ms(), self._client_id))
        run.showing.show_children_again()
        current_run.set(run)
        failed = await self._run_nodes(run, outputs)
        run.progress.flush()
        if failed is not None:
            failure, error = failed
            self.handle_execution_error(
                run.prompt_id, run.prompt.original_prompt, tuple(run.signatures.parts),
                tuple(run.executed), failure, error,
            )  # fmt: skip
        else:
            self._ended(events.ExecutionSuccess(run.prompt_id, events.now_ms(), self._client_id))

    async def _run_nodes(
        self, run: PromptRun, outputs: Sequence[str]
    ) -> tuple[Failure, BaseException | None] | None:
        """The main loop; returns what failed."""
        pending, shown = run.pending, run.showing.ui_outputs
        run.results.expect(outputs, run.is_known)
        for output in outputs:
            try:
                pending.add_node(output)
            except Exception as broken:  # noqa: BLE001 - a link leads nowhere, a class is gone
                return describe_failure(output, broken, {}), broken
        while len(pending):
            node_id = pending.stage()
            if node_id is None:
                failed = await self._wait_for_tasks(run)
                if failed is not None:
                    return failed
                continue
            result, failure, error = await execute(
                self.server, run.prompt, self.caches, node_id, run.extra_data, run.executed,
                run.prompt_id, pending, run.waiting, run.started, shown,
            )  # fmt: skip
            if result is ExecutionResult.FAILURE:
                assert failure is not None
                return failure, error
            if result is ExecutionResult.PENDING:
                pending.unstage()
            else:
                pending.complete()
                run.results.completed(node_id)
            if run.started:
                await asyncio.sleep(0)  # let async nodes go on
        return None

    async def _wait_for_tasks(self, run: PromptRun) -> tuple[Failure, BaseException | None] | None:
        """Nothing is ready: waits for an async node, or reports the cycle that blocks all."""
        if not run.pending.has_external_blocks:
            cycle = run.pending.find_cycle()
            error = DependencyCycleError(cycle)
            blamed = next((n for n in cycle if run.prompt.get_parent_node_id(n)), cycle[0])
            return describe_failure(blamed, error, {}), error
        if self.interrupt.is_set():
            self.interrupt.clear()
            return Failure(next(iter(run.started)), interrupted=True), None
        tasks = run.unfinished_tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # lets the tasks' callbacks run
        return None

    async def _wind_up(self, run: PromptRun) -> None:
        """Ends what may still run, fills the history, tells the cache. The outcome stands."""
        tasks = run.unfinished_tasks()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        shown = run.showing.ui_outputs
        self.history_result = {
            "outputs": {name: ui["output"] for name, ui in shown.items()},
            "meta": {name: ui["meta"] for name, ui in shown.items()},
            "nodes": run.record.nodes(),
        }
        environment = self.options.environment()
        if environment:
            self.history_result["environment"] = dict(environment)
        run.showing.remember_children(run.expanded_entries)
        self._previous_parts = run.signatures.parts
        self.caches.outputs.end({run.prompt.get_real_node_id(name) for name in run.expanded})

    # --- messages -----------------------------------------------------------------------------

    def _send(self, event: events.Event) -> None:
        """Publishes an event and keeps it for the history."""
        self.status_messages.append((event.name, event.payload()))
        self.server.publish(event)

    def _ended(self, event: events.Event) -> None:
        """Keeps the last event for the history, and for ``announce_end``."""
        self.status_messages.append((event.name, event.payload()))
        self._end = event

    def add_message(self, event: str, data: dict[str, Any], broadcast: bool) -> None:
        """Sends a message to the owner of the running prompt (or all) and keeps it for history."""
        stamped = {**data, "timestamp": events.now_ms()}
        self.status_messages.append((event, stamped))
        if self._client_id is not None or broadcast:
            client_id = None if broadcast else self._client_id
            self.server.publish(events.CustomEvent(event, stamped, client_id))

    def handle_execution_error(
        self,
        prompt_id: str,
        prompt: Mapping[str, Any],
        current_outputs: Sequence[str],
        executed: Sequence[str],
        error: Failure,
        ex: BaseException | None,  # noqa: ARG002 - packages that wrap this look at it
    ) -> None:
        """Ends the prompt as failed or interrupted."""
        self.success = False
        run = current_run.get()
        failing = error.node_id
        node_id = run.prompt.get_real_node_id(failing) if run is not None else failing
        node_type = str(prompt.get(node_id, {}).get("class_type", ""))
        now, client_id = events.now_ms(), self._client_id
        if error.interrupted:
            logger.info("prompt %s was interrupted in node %s", prompt_id, failing)
            self._ended(
                events.ExecutionInterrupted(
                    prompt_id, node_id, node_type, _named(executed, prompt), now, client_id
                )
            )
            return
        logger.error(
            "prompt %s failed in node %s (%s): %s: %s\n%s", prompt_id, failing, node_type,
            error.exception_type, error.message.strip(), "".join(error.traceback),
        )  # fmt: skip
        details = {"expanded_node_id": failing} if failing != node_id else None
        failed = events.ExecutionError(
            prompt_id, node_id, node_type, _named(executed, prompt), error.message,
            error.exception_type, error.traceback, error.current_inputs,
            _named(current_outputs, prompt), now, details, client_id,
        )  # fmt: skip
        self._ended(failed)

    def _raise_in_threads(self) -> None:
        """For threads that a node has started: the flag stays, for the node may not notice."""
        if self.interrupt.is_set():
            raise self.interrupt.exception

    def _raise_if_interrupted(self) -> None:
        if self.interrupt.is_set():
            self.interrupt.clear()
            raise self.interrupt.exception


def _named(node_ids: Sequence[str], prompt: Mapping[str, Any]) -> tuple[str, ...]:
    """Ids for an error message: all posted nodes among them, and not too many expanded ones."""
    if len(node_ids) - len(prompt) <= MOST_EXPANDED_NAMED:
        return tuple(node_ids)
    others = (name for name in node_ids if name not in prompt)
    kept = set(itertools.islice(others, MOST_EXPANDED_NAMED))
    return tuple(name for name in node_ids if name in prompt or name in kept)


async def execute(
    server: events.EventSink,  # noqa: ARG001 - name and order of parameters are public: packages
    dynprompt: DynamicPrompt,  # noqa: ARG001 - wrap this function; the run has it all
    caches: CacheSet,  # noqa: ARG001
    current_item: str,
    extra_data: Mapping[str, Any],  # noqa: ARG001
    executed: Any,  # noqa: ARG001
    prompt_id: str,  # noqa: ARG001
    execution_list: Any,  # noqa: ARG001
    pending_subgraph_results: Any,  # noqa: ARG001
    pending_async_nodes: Any,  # noqa: ARG001
    ui_outputs: Any,  # noqa: ARG001
) -> StepResult:
    """Runs one node of the current prompt as far as it goes now.

    Returns:
        (SUCCESS, FAILURE or PENDING, what failed, what was raised).
    """
    run = current_run.get()
    assert run is not None, "execute() is called while a prompt runs"
    return await run.step(current_item)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Ends what a node left running on the loop, and the loop."""
    try:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
