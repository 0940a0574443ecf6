"""What a worker process is: the program without HTTP, journal and supervisor, fed by the server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import folder_paths
from comfy_execution import supervisor
from comfy_execution.workers.channel import PipeChannel
from comfy_execution.workers.local import leave_signals_to_the_server, standard_streams
from utils import (
    execution,
    node_manager,
    policies,
    save_turns,
    start_up,
    thread_scope,
    workers,
)

if TYPE_CHECKING:
    from comfy_server import LogCapture

logger = logging.getLogger(__name__)


def work(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs a worker in this process until its server ends it."""
    channel = standard_streams()
    supervisor.end_with_parent()
    leave_signals_to_the_server()
    os.environ.pop(supervisor.WORKER_VARIABLE)  # what packs start is no worker
    args.cuda_device = args.default_device = args.oneapi_device_selector = None  # see the variables
    with start_up.refusing(OSError, ValueError):
        logs = start_up.configure_logging(args)
        start_up.choose_devices(args)
        start_up.configure_folders(args, clear_temp=False)
    mark = os.environ.pop(workers.SHARED_VARIABLE, None)
    reason = workers.why_not_shared(mark) if mark is not None else None
    if reason is not None:
        channel.send({"say": "refused", "why": reason})
        return 1
    start_up.prepare_interpreter(keep_pages=not args.disable_cpu_tuning)
    with thread_scope.inherited_by_threads() if args.auth else contextlib.nullcontext():
        asyncio.run(serve(args, argv, logs, channel))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that nodes have left behind must not hold the server up


async def serve(
    args: argparse.Namespace, argv: Sequence[str], logs: LogCapture, channel: PipeChannel
) -> None:
    """Loads nodes, tells the server, and runs what it sends."""
    import nodes
    from comfy.devices import accelerators, report, residency, runtime
    from comfy.interrupt import INTERRUPT
    from comfy_api.feature_flags import SERVER_FEATURE_FLAGS
    from comfy_execution.context import check_interrupt
    from comfy_execution.workers.seat import Seat, WorkerQueue
    from comfy_nodes.custom_packs import run_prestartup_scripts
    from comfy_server import Services
    from comfy_server.relay import RelayServer

    queue = WorkerQueue(interrupt=INTERRUPT, history_limit=2)
    services = Services(queue, system_stats=report.system_stats, memory=residency.memory_report)
    options = policies.server_options(args, argv)
    loop = asyncio.get_running_loop()
    server = RelayServer(loop, options, services, logs, channel.send)
    SERVER_FEATURE_FLAGS.update(server.get_feature_flags())
    packs = execution.select_packs(args, node_manager.find_manager(args))
    run_prestartup_scripts(packs)
    execution.install_devices(args)
    await execution.load_nodes(packs, args.disabled_nodes_config)
    registry = execution.install_nodes(args)
    executor = execution.build_executor(args, server, registry)
    worker = execution.build_worker(
        args, server, queue, executor, lambda: os._exit(supervisor.RESTART_EXIT_CODE)
    )
    start_up.keep_for_good()
    seat = Seat(
        channel,
        queue,
        server.sockets_metadata,
        functools.partial(execution.plan, executor),
        residency.memory_report,
    )
    locks = os.path.join(folder_paths.get_temp_directory(), ".saving")
    save_turns.install(save_turns.SaveTurns(locks, check_interrupt))
    worker.start()
    device = runtime.get_runtime().device
    await seat.serve(
        {
            "device": f"{accelerators.device_name(device)} ({device})",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "nodes": list(nodes.NODE_CLASS_MAPPINGS),
        }
    )
    await asyncio.to_thread(worker.stop)
