"""Composition root: arguments -> policies -> services -> nodes -> serve.

Only this module, with those of `utils` that it calls, turns arguments into folders, logging,
threads and policies. `run` is the console entry: it starts the supervisor, which runs the server in
a child process and starts it again if native code kills it. With `--workers` or `--ray` the same
program also runs as the server's workers. Everything the supervisor can do without is imported
where it is needed: the child starts when the supervisor's imports are done.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy import cli_args
from comfy_execution import supervisor
from utils import execution, node_manager, policies, start_up, thread_scope, workers

if TYPE_CHECKING:
    from comfy_execution.worker import Worker
    from comfy_execution.workers.place import Place
    from comfy_execution.workers.pool import WorkerPool
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


def restart_process() -> None:
    """Ends this process at once; its supervisor starts it again with the queue as it is."""
    os._exit(supervisor.RESTART_EXIT_CODE)


# Services


class Program:
    """The running server: everything that is built once, in the order in which it is needed."""

    def __init__(self, args: argparse.Namespace, argv: Sequence[str], logs: LogCapture) -> None:
        self.args, self.argv = args, argv
        self.places: list[Place] = []  # of workers in other processes, where they are asked for
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
        packs = execution.select_packs(self.args, manager)
        manager.prepare()
        run_prestartup_scripts(packs)
        execution.install_devices(self.args)
        if workers.are_asked_for(self.args) and not self.args.quick_test_for_ci:
            with start_up.refusing(OSError, ValueError):
                self.places = workers.start_places(self.args, self.argv, self.queue, server)
        manager.start(server.app)
        with start_up.ended_by_ctrl_c():
            await execution.load_nodes(packs, self.args.disabled_nodes_config)
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
        is_alone = not workers.are_asked_for(self.args)
        self.queue = PromptQueue(interrupt=INTERRUPT if is_alone else None, journal=self.journal)
        if not is_alone:
            INTERRUPT.elsewhere = self.queue.interrupt  # for routes of packs
        services = Services(
            self.queue,
            system_stats=report.system_stats,
            metrics=lambda: {"memory_bytes": report.memory_by_owner()},
            memory=residency.memory_report,
        )
        server = PromptServer(asyncio.get_running_loop(), self.options, services, self.logs)
        SERVER_FEATURE_FLAGS.update(server.get_feature_flags())
        return server

    def build_worker(self, server: PromptServer) -> Worker | WorkerPool:
        """What runs prompts: an executor with its thread, or workers in other processes."""
        import nodes
        from comfy_api.latest import replacements
        from comfy_execution.node_info import node_info
        from comfy_execution.validation import validate_prompt

        registry = execution.install_nodes(self.args)

        def listing(name: str) -> dict[str, Any]:
            spec = registry.get(name)
            return node_info(spec, registry.display_name(name)) if spec is not None else {}

        services = server.services
        services.node_names = lambda: list(registry)
        services.node_info = listing
        services.validate = validate_prompt
        services.node_replacements = replacements.listed_replacements
        services.apply_replacements = lambda prompt: replacements.replace_old_nodes(
            prompt, lambda name: name in nodes.NODE_CLASS_MAPPINGS
        )
        server.packs.web_directories.update(nodes.EXTENSION_WEB_DIRS)

        worker: Worker | WorkerPool
        if self.places:
            worker = workers.build_pool(self.places, server, registry)
        else:
            executor = execution.build_executor(self.args, server, registry)
            services.plan = functools.partial(execution.plan, executor)
            restart = restart_process if supervisor.LIFELINE_VARIABLE in os.environ else None
            worker = execution.build_worker(self.args, server, self.queue, executor, restart)
        self.recover_queue(server)
        return worker

    def recover_queue(self, server: PromptServer) -> None:
        """Takes over what the previous process left in the journal."""
        from comfy_execution.recovery import StartMode, recover

        if self.journal is None:
            return
        modes = {"resume": StartMode.RESUME, "paused": StartMode.PAUSE, "clear": StartMode.CLEAR}
        recover(
            self.queue,
            self.journal,
            modes[self.args.on_restart],
            retry_running=not supervisor.was_native_crash(os.environ),
        )
        server.number = max(server.number, self.queue.next_number())

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
    if workers.is_worker(os.environ):
        from utils.worker_process import work

        return work(args, argv)
    is_child = supervisor.tie_to_parent(os.environ)
    runs_once = args.quick_test_for_ci or args.add_user or args.list_feature_flags
    if is_child or args.no_supervisor or runs_once:
        return main(argv)
    return supervisor.supervise([sys.executable, os.path.abspath(__file__), *argv], os.environ)


if __name__ == "__main__":
    sys.exit(run())
