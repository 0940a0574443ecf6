"""Workers in other processes, where the arguments ask for them: which, on what, and how started."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_execution import supervisor

if TYPE_CHECKING:
    from comfy_execution.planning import Plan
    from comfy_execution.queue import PromptQueue
    from comfy_execution.registry import NodeRegistry
    from comfy_execution.workers.channel import Launcher
    from comfy_execution.workers.place import Place
    from comfy_execution.workers.pool import WorkerPool
    from comfy_server import PromptServer

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).resolve().parent.parent / "main.py"

VISIBLE: Mapping[str, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    "mlu": ("MLU_VISIBLE_DEVICES",),
    "xpu": ("ZE_AFFINITY_MASK",),
}
"""Kind of accelerator -> variables that say which of them a process sees."""


SHARED_VARIABLE = "LATENTLOOM_SHARED"
"""Name and content of a file that a worker on another machine must find in its folders."""


def are_asked_for(args: argparse.Namespace) -> bool:
    """Whether prompts run in other processes than the server's."""
    return args.workers > 0 or args.ray is not None or args.ray_workers > 0


def is_worker(environment: Mapping[str, str]) -> bool:
    """Whether this process is to be a worker."""
    return supervisor.WORKER_VARIABLE in environment


def start_places(
    args: argparse.Namespace, argv: Sequence[str], queue: PromptQueue, server: PromptServer
) -> list[Place]:
    """Starts the workers; they load their nodes while the server loads its own.

    Raises:
        OSError: Ray is not installed, or the cluster cannot be reached.
        ValueError: There are fewer devices than workers.
    """
    from comfy_execution.workers.place import Place
    from comfy_server.relay import PICTURES

    starts: list[tuple[str, Launcher]] = []
    if args.workers:
        local = local_launcher(args.workers, argv)
        starts += [(str(number), local) for number in range(1, args.workers + 1)]
    if args.ray is not None or args.ray_workers:
        from comfy_execution.workers.ray_bridge import RayLauncher

        shared = {SHARED_VARIABLE: mark_shared_folders(args.port)}
        remote = RayLauncher(
            args.ray or "auto",
            args.ray_workers,
            [str(PROGRAM), *argv],
            shared,
            uses_cpu=args.cpu,
        )
        count = remote.connect()
        starts += [(f"ray-{number}", remote) for number in range(1, count + 1)]
    after_s = args.restart_after or None
    places = [Place(name, launcher, queue, server, PICTURES, after_s) for name, launcher in starts]
    for place in places:
        place.start()
    return places


def build_pool(places: Sequence[Place], server: PromptServer, registry: NodeRegistry) -> WorkerPool:
    """The pool of these workers, which the server's routes ask from here on."""
    from comfy_execution.caching import CacheType, make_cache
    from comfy_execution.planning import plan_prompt
    from comfy_execution.workers.pool import WorkerPool

    services = server.services
    pool = WorkerPool(services.queue, places, registry, server)
    stats = services.system_stats

    def memory_by_owner() -> dict[str, int]:
        held: dict[str, int] = {}
        for row in pool.memory():
            owner = f"{row['model']} on {row['device']} of worker {row['worker']}"
            held[owner] = held.get(owner, 0) + row["loaded_bytes"]
        return held

    async def plan(prompt: dict[str, Any], outputs: list[str], extra: dict[str, Any]) -> Plan:
        planned = await pool.plan(prompt, outputs, extra)
        if planned is not None:
            return planned
        return await plan_prompt(prompt, outputs, registry, make_cache(CacheType.NONE), extra)

    services.plan = plan
    services.ready = pool.not_ready
    services.memory = pool.memory
    services.metrics = lambda: {"memory_bytes": memory_by_owner()}
    services.system_stats = lambda: {**stats(), "workers": pool.health()}
    return pool


def local_launcher(count: int, argv: Sequence[str]) -> Launcher:
    """Starts workers of this machine, each with a device of its own.

    Raises:
        ValueError: There are fewer devices than workers.
    """
    from comfy_execution.workers.local import LocalLauncher

    shares = device_shares(count)
    command = [sys.executable, str(PROGRAM), *argv]
    return LocalLauncher(command, lambda name: shares[int(name) - 1])


def shared_folders() -> dict[str, str]:
    """Folders in which the server and its workers must see the same files, by kind."""
    return {
        "output": folder_paths.get_output_directory(),
        "input": folder_paths.get_input_directory(),
        "temp": folder_paths.get_temp_directory(),
    }


def mark_shared_folders(port: int) -> str:
    """Puts a mark into each shared folder while this process lives; returns what it is.

    Args:
        port: Where this server serves: each has one mark, and finds that of its predecessor.
    Raises:
        OSError: A folder that workers write into cannot be written.
    """
    name, token = f".latentloom-{socket.gethostname()}-{port}", uuid.uuid4().hex
    marked = []
    for kind, folder in shared_folders().items():
        file = Path(folder, name)
        try:
            file.write_text(token)
        except OSError as error:
            if kind != "input":
                raise
            logger.warning(
                "%s cannot be written (%s): whether workers see the same there is not checked",
                folder,
                error.strerror,
            )
        else:
            marked.append(kind)
            atexit.register(_remove, file)
    return ":".join((name, token, *marked))


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):  # its folder may be gone
        file.unlink()


def why_not_shared(mark: str) -> str | None:
    """Why this machine cannot work for the server that has left this mark, if so."""
    name, token, *marked = mark.split(":")
    for folder in map(shared_folders().__getitem__, marked):
        try:
            is_shared = Path(folder, name).read_text() == token
        except OSError:
            is_shared = False
        if not is_shared:
            return (
                f"{folder} on {socket.gethostname()} is not the server's folder of that name; "
                "mount the server's folders under the same paths on every machine of the cluster"
            )
    return None


def device_shares(count: int) -> list[dict[str, str]]:
    """For each of so many workers the variables that give it its device, or its threads.

    Raises:
        ValueError: There are fewer devices than workers.
    """
    import torch

    from comfy.devices import accelerators, runtime

    kind = runtime.get_runtime().device.type
    if kind == "cpu":
        threads = os.environ.get("OMP_NUM_THREADS") or max(1, torch.get_num_threads() // count)
        return [{"OMP_NUM_THREADS": str(threads)}] * count
    number = len(accelerators.accelerator_devices())
    if count > 1 and count > number:
        raise ValueError(
            f"--workers {count} needs as many devices, and this machine has {number} ({kind}); "
            f"start with --workers {number}, or with --cpu"
        )
    names = VISIBLE.get(kind, ())
    if count > 1 and not names:
        raise ValueError(f"--workers {count}: devices of kind {kind} cannot be told apart")
    visible = [os.environ[name] for name in names if os.environ.get(name)]
    ids = visible[0].split(",") if visible else [str(index) for index in range(number)]
    return [dict.fromkeys(names, ids[index]) for index in range(count)]
