"""Composition root: arguments -> policies -> services -> nodes -> serve.

Only this module, with `utils.start_up` and `utils.policies`, turns arguments into folders, logging,
threads and policies. `run` is the console entry: it starts the supervisor, which runs the server in
a child process and starts it again if native code kills it. Everything the supervisor can do
without is imported where it is needed: the child starts when the supervisor's imports are done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy import cli_args
from comfy_execution import supervisor
from utils import node_manager, policies, start_up, thread_scope

if TYPE_CHECKING:
    from comfy_execution.executor import ExecutorOptions
    from comfy_execution.worker import Worker
    from comfy_nodes.custom_packs import PackSelection
    from comfy_server import LogCapture, PromptServer

logger = logging.getLogger(__name__)


# What the services ask for


def add_user(args: argparse.Namespace) -> int:
    """Makes or renews the user that `--add-user` names and shows the token, this once."""
    from comfy_server.accounts import AccountRefused
    from comfy_server.auth import add_account

    if args.base_directory:
        folder_paths.set_base_directory(args.base_directory)
    if args.user_directory:
        folder_paths.set_user_directory(args.user_directory)
    try:
        sys.stdout.write(f"{add_account(args.add_user)}\n")
    except AccountRefused as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


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
            yield

    def see_inputs(inputs: Mapping[str, list[Any]]) -> None:
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


def restart_process() -> None:
    """Ends this process at once; its supervisor starts it again with the queue as it is."""
    os._exit(supervisor.RESTART_EXIT_CODE)


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


async def load_nodes(packs: PackSelection, left_out: str | None) -> None:
    """Fills the node table: core nodes, built-in extras, packs; less those a file names."""
    import nodes

    await nodes.init_extra_nodes(selection=packs)
    for name in policies.disabled_nodes(left_out) if left_out else ():
        if nodes.NODE_CLASS_MAPPINGS.pop(name, None) is None:
            logger.warning("%s names the node %s, which there is not", left_out, name)


# Services


class Program:
    """The running server: everything that is built once, in the order in which it is needed."""

    def __init__(self, args: argparse.Namespace, argv: Sequence[str], logs: LogCapture) -> None:
        self.args = args
        self.options = policies.server_options(args, argv)
        self.logs = logs

    async def serve(self) -> None:
        """Builds the services, loads nodes and packs, and serves until told to end."""
        import asyncio

        from comfy_execution.journal_lock import JournalError
        from comfy_nodes.custom_packs import run_prestartup_scripts
        from comfy_server import serve
        from comfy_server.serving import CannotListen

        with start_up.refusing(JournalError):
            server = self.build_server()
        manager = node_manager.find_manager(self.args)
        packs = self.select_packs(manager)
        manager.prepare()
        run_prestartup_scripts(packs)
        self.install_devices()
        manager.start(server.app)
        with start_up.ended_by_ctrl_c():
            await load_nodes(packs, self.args.disabled_nodes_config)
        worker = self.build_worker(server)
        server.add_routes()
        start_up.keep_for_good()
        if self.args.quick_test_for_ci:
            return
        worker.start()
        try:
            with start_up.refusing(CannotListen):
                await serve(server, on_listening=self.on_listening)
        finally:
            await asyncio.to_thread(worker.stop)
            if self.journal is not None:
                self.journal.close()

    def build_server(self) -> PromptServer:
        """The HTTP side with its queue; packs find it as `PromptServer.instance`."""
        import asyncio

        from comfy.devices import report, residency
        from comfy.interrupt import INTERRUPT
        from comfy_api.feature_flags import SERVER_FEATURE_FLAGS
        from comfy_execution.journal import open_journal
        from comfy_execution.queue import PromptQueue
        from comfy_server import PromptServer, Services

        folder = Path(folder_paths.get_system_user_directory("latentloom"))
        self.journal = None if self.args.no_journal else open_journal(folder, self.args.port)
        self.queue = PromptQueue(interrupt=INTERRUPT, journal=self.journal)
        services = Services(
            self.queue,
            system_stats=report.system_stats,
            metrics=lambda: {"memory_bytes": report.memory_by_owner()},
            memory=residency.memory_report,
        )
        server = PromptServer(asyncio.get_running_loop(), self.options, services, self.logs)
        SERVER_FEATURE_FLAGS.update(server.get_feature_flags())
        return server

    def install_devices(self) -> None:
        """Resolves the policies against the machine."""
        from comfy.devices import processor, runtime
        from comfy.nn import attention

        precision = policies.precision_policy(self.args)
        runtime.install_runtime(runtime.build_runtime(policies.memory_policy(self.args), precision))
        with start_up.refusing(ValueError):
            attention.configure(attention.AttentionPolicy(precision.attention))
        device = runtime.get_runtime().device
        logger.info("device: %s", device)
        if device.type == "cpu":
            processor.log_choices(
                precision.tune_cpu, precision.cpu_bf16, "bfloat16" in str(precision.unet_dtype)
            )

    def select_packs(self, manager: node_manager.NodeManager) -> PackSelection:
        """Which packs of `custom_nodes` the arguments ask for."""
        from comfy_nodes.custom_packs import PackSelection

        allowed = tuple(self.args.whitelist_custom_nodes)
        return PackSelection(self.args.disable_all_custom_nodes, allowed, manager.refuses)

    def build_worker(self, server: PromptServer) -> Worker:
        """The executor with its policies, and the thread that feeds it."""
        import latent_preview
        import nodes
        from comfy.devices import residency
        from comfy.devices.heap import HEAP
        from comfy.interrupt import INTERRUPT
        from comfy.progress import set_note_hook, set_progress_bar_global_hook
        from comfy_api.internal.policy import SavePolicy, install_save_policy
        from comfy_api.latest import replacements
        from comfy_execution.breaker import Breaker
        from comfy_execution.executor import PromptExecutor
        from comfy_execution.node_info import node_info
        from comfy_execution.planning import plan_prompt
        from comfy_execution.progress import make_note_hook, make_progress_hook
        from comfy_execution.recovery import StartMode, recover
        from comfy_execution.registry import NodeRegistry, install
        from comfy_execution.text_limit import install_text_limit
        from comfy_execution.validation import validate_prompt
        from comfy_execution.worker import Worker, WorkerHooks

        registry = NodeRegistry(nodes.NODE_CLASS_MAPPINGS, nodes.NODE_DISPLAY_NAME_MAPPINGS)
        install(registry)

        def listing(name: str) -> dict[str, Any]:
            spec = registry.get(name)
            return node_info(spec, registry.display_name(name)) if spec is not None else {}

        server.services.node_names = lambda: list(registry)
        server.services.node_info = listing
        server.services.validate = validate_prompt
        server.services.node_replacements = replacements.listed_replacements
        server.services.apply_replacements = lambda prompt: replacements.replace_old_nodes(
            prompt, lambda name: name in nodes.NODE_CLASS_MAPPINGS
        )
        install_save_policy(SavePolicy(metadata=not self.args.disable_metadata))
        install_text_limit(int(self.args.max_text_size * 2**20))
        server.packs.web_directories.update(nodes.EXTENSION_WEB_DIRS)

        executor = PromptExecutor(registry, server, INTERRUPT, executor_options(self.args, server))
        server.services.plan = lambda prompt, outputs, extra: plan_prompt(
            prompt, outputs, registry, executor.caches.outputs, extra, executor.options.privacy
        )
        can_restart = supervisor.LIFELINE_VARIABLE in os.environ and self.args.restart_after > 0
        breaker = Breaker(
            executor.guard,
            INTERRUPT.exception,
            self.queue.is_running,
            restart=restart_process if can_restart else None,
            restart_after_s=self.args.restart_after,
        )
        self.queue.add_interrupt_listener(breaker.follow)
        set_progress_bar_global_hook(make_progress_hook())
        set_note_hook(make_note_hook())
        if self.journal is not None:
            modes = {
                "resume": StartMode.RESUME,
                "paused": StartMode.PAUSE,
                "clear": StartMode.CLEAR,
            }
            recover(
                self.queue,
                self.journal,
                modes[self.args.on_restart],
                retry_running=not supervisor.was_native_crash(os.environ),
            )
            server.number = max(server.number, self.queue.next_number())
        last_owner: list[object] = [None]

        def prepare(extra_data: Mapping[str, Any]) -> None:
            latent_preview.set_preview_method(preview_method(extra_data, self.args, server))
            if last_owner != [extra_data.get("user_id")]:
                executor.caches.objects.clear()  # node instances remember folders of their user
                last_owner[:] = [extra_data.get("user_id")]

        hooks = WorkerHooks(
            prepare,
            unload_models=residency.unload_all_models,
            collect=HEAP.give_back,
            idle=residency.unload_idle,
        )
        return Worker(self.queue, executor, hooks)

    def on_listening(self, listeners: list[Any]) -> None:
        """Tells the supervisor, and opens the editor where the arguments ask for it."""
        supervisor.tell_serving(os.environ)
        if self.args.auto_launch and not self.args.disable_auto_launch:
            import webbrowser

            webbrowser.open(listeners[0].url.replace("0.0.0.0", "127.0.0.1"))


def main(argv: Sequence[str]) -> int:
    """Runs the server in this process until it is told to end; returns the exit status."""
    import asyncio

    args = cli_args.fill(argv)
    if args.add_user:
        return add_user(args)
    if args.list_feature_flags:
        from comfy_server.features import server_features

        options = policies.server_options(args, argv)
        sys.stdout.write(f"{json.dumps(server_features(options), indent=2)}\n")
        return 0
    with start_up.refusing(OSError, ValueError):
        logs = start_up.configure_logging(args)
        start_up.choose_devices(args)
        start_up.configure_folders(args)
    for flag in cli_args.ineffective(cli_args.build_parser(), argv):
        logger.warning("%s is accepted but has no effect here", flag)
    start_up.prepare_interpreter(keep_pages=not args.disable_cpu_tuning)
    with thread_scope.inherited_by_threads() if args.auth else contextlib.nullcontext():
        asyncio.run(Program(args, argv, logs).serve())
    return 0


def run() -> int:
    """Console entry: the server under its supervisor, unless that is switched off."""
    argv = sys.argv[1:]
    args = cli_args.fill(argv)
    is_child = supervisor.tie_to_parent(os.environ)
    runs_once = args.quick_test_for_ci or args.add_user or args.list_feature_flags
    if is_child or args.no_supervisor or runs_once:
        return main(argv)
    return supervisor.supervise([sys.executable, os.path.abspath(__file__), *argv], os.environ)


if __name__ == "__main__":
    sys.exit(run())
