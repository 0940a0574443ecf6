"""The side of the program that runs prompts: devices, nodes, the executor and what feeds it.

The server builds it for itself, and every worker process does, with the same arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy import cli_args
from utils import node_manager, policies, save_turns, start_up

if TYPE_CHECKING:
    from comfy_execution.executor import ExecutorOptions, PromptExecutor
    from comfy_execution.planning import Plan
    from comfy_execution.queue import PromptQueue
    from comfy_execution.registry import NodeRegistry
    from comfy_execution.worker import Worker
    from comfy_nodes.custom_packs import PackSelection
    from comfy_server import PromptServer

logger = logging.getLogger(__name__)


def install_devices(args: argparse.Namespace) -> None:
    """Resolves the policies against the machine."""
    from comfy.devices import processor, runtime
    from comfy.nn import attention

    precision = policies.precision_policy(args)
    runtime.install_runtime(runtime.build_runtime(policies.memory_policy(args), precision))
    with start_up.refusing(ValueError):
        attention.configure(attention.AttentionPolicy(precision.attention))
    device = runtime.get_runtime().device
    logger.info("device: %s", device)
    if device.type == "cpu":
        processor.log_choices(
            precision.tune_cpu, precision.cpu_bf16, "bfloat16" in str(precision.unet_dtype)
        )


def select_packs(args: argparse.Namespace, manager: node_manager.NodeManager) -> PackSelection:
    """Which packs of `custom_nodes` the arguments ask for."""
    from comfy_nodes.custom_packs import PackSelection

    allowed = tuple(args.whitelist_custom_nodes)
    return PackSelection(args.disable_all_custom_nodes, allowed, manager.refuses)


async def load_nodes(packs: PackSelection, left_out: str | None) -> None:
    """Fills the node table: core nodes, built-in extras, packs; less those a file names."""
    import nodes

    await nodes.init_extra_nodes(selection=packs)
    for name in policies.disabled_nodes(left_out) if left_out else ():
        if nodes.NODE_CLASS_MAPPINGS.pop(name, None) is None:
            logger.warning("%s names the node %s, which there is not", left_out, name)


def install_nodes(args: argparse.Namespace) -> NodeRegistry:
    """Makes the loaded nodes known to validation and executor, and sets bounds for them."""
    import nodes
    from comfy_api.internal.policy import SavePolicy, install_save_policy
    from comfy_execution.registry import NodeRegistry, install
    from comfy_execution.text_limit import install_text_limit

    registry = NodeRegistry(nodes.NODE_CLASS_MAPPINGS, nodes.NODE_DISPLAY_NAME_MAPPINGS)
    install(registry)
    install_save_policy(SavePolicy(metadata=not args.disable_metadata))
    install_text_limit(int(args.max_text_size * 2**20))
    return registry


def executor_options(args: argparse.Namespace, server: PromptServer) -> ExecutorOptions:
    """Cache policy and hooks of the executor."""
    import torch

    from comfy.devices.memory import get_free_memory
    from comfy.devices.prompt_models import PROMPT_MODELS
    from comfy.devices.report import free_after_oom
    from comfy.sampling.environment import environment
    from comfy_execution.caching import CacheType, make_cache
    from comfy_execution.executor import ExecutorOptions
    from comfy_execution.privacy import Privacy
    from comfy_server.results import files_exist

    kinds = {
        CacheType.LRU: args.cache_lru > 0,
        CacheType.NONE: args.cache_none,
        CacheType.RAM_PRESSURE: args.cache_ram > 0,
    }
    kind = next((kind for kind, is_chosen in kinds.items() if is_chosen), CacheType.CLASSIC)
    headroom = int(args.cache_ram * policies.GIB)

    @contextlib.contextmanager
    def run_context() -> Iterator[None]:
        with torch.inference_mode(), server.run_scope(), PROMPT_MODELS.running():
            try:
                yield
            finally:
                save_turns.give_back_turns()

    def see_inputs(inputs: Mapping[str, list[Any]]) -> None:
        save_turns.give_back_turns()  # of the node before
        for values in inputs.values():
            for value in values:
                PROMPT_MODELS.add(value)

    return ExecutorOptions(
        cache=make_cache(
            kind,
            lru_size=args.cache_lru,
            ram_headroom_bytes=headroom,
            free_bytes=lambda: get_free_memory(torch.device("cpu")),
        ),
        run_context=run_context,
        oom_hook=free_after_oom,
        ui_is_valid=files_exist,
        see_inputs=see_inputs,
        privacy=Privacy(folder_paths.scoped_user, folder_paths.scope_uses),
        environment=environment,
    )


def preview_method(
    extra_data: Mapping[str, Any], args: argparse.Namespace, server: PromptServer
) -> str | None:
    """Name of the preview method of a prompt; None leaves the one in force.

    The prompt's own choice comes first. Where neither it nor the command line says anything,
    clients that can tell a preview from a result get the best there is.
    """
    named = str(extra_data.get("preview_method") or "")
    if cli_args.LatentPreviewMethod.from_string(named) is not None:
        return named
    if named not in ("", "default"):  # as the editor calls the server's own choice
        known = ", ".join(method.value for method in cli_args.LatentPreviewMethod)
        logger.warning(
            "extra_data names the preview method %.60r, which there is not; known: default, %s",
            named,
            known,
        )
    client = server.sockets_metadata.get(str(extra_data.get("client_id")), {})
    understands = client.get("feature_flags", {}).get("supports_preview_metadata")
    return "auto" if args.automatic_previews and understands else None


def build_executor(
    args: argparse.Namespace, server: PromptServer, registry: NodeRegistry
) -> PromptExecutor:
    """The executor with its policies; progress of running nodes goes through it."""
    from comfy.interrupt import INTERRUPT
    from comfy.progress import set_note_hook, set_progress_bar_global_hook
    from comfy_execution.executor import PromptExecutor
    from comfy_execution.progress import make_note_hook, make_progress_hook

    set_progress_bar_global_hook(make_progress_hook())
    set_note_hook(make_note_hook())
    return PromptExecutor(registry, server, INTERRUPT, executor_options(args, server))


def build_worker(
    args: argparse.Namespace,
    server: PromptServer,
    queue: PromptQueue,
    executor: PromptExecutor,
    restart: Callable[[], None] | None,
) -> Worker:
    """The thread that feeds an executor.

    Args:
        restart: Ends this process when a prompt cannot be stopped; None waits for ever.
    """
    import latent_preview
    from comfy.devices import residency
    from comfy.devices.heap import HEAP
    from comfy.interrupt import INTERRUPT
    from comfy_execution.breaker import Breaker
    from comfy_execution.worker import Worker, WorkerHooks

    breaker = Breaker(
        executor.guard,
        INTERRUPT.exception,
        queue.is_running,
        restart=restart if args.restart_after > 0 else None,
        restart_after_s=args.restart_after,
    )
    queue.add_interrupt_listener(breaker.follow)
    last_owner: list[object] = [None]

    def prepare(extra_data: Mapping[str, Any]) -> None:
        latent_preview.set_preview_method(preview_method(extra_data, args, server))
        if last_owner != [extra_data.get("user_id")]:
            executor.caches.objects.clear()  # node instances remember folders of their user
            last_owner[:] = [extra_data.get("user_id")]

    hooks = WorkerHooks(
        prepare,
        unload_models=residency.unload_all_models,
        collect=HEAP.give_back,
        idle=residency.unload_idle,
    )
    return Worker(queue, executor, hooks)


async def plan(
    executor: PromptExecutor,
    prompt: dict[str, Any],
    outputs: list[str],
    extra_data: Mapping[str, Any],
) -> Plan:
    """What a prompt would do with the results an executor has."""
    from comfy_execution.planning import plan_prompt

    cache, privacy = executor.caches.outputs, executor.options.privacy
    return await plan_prompt(prompt, outputs, executor.registry, cache, extra_data, privacy)
