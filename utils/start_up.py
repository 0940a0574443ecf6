"""What a process is before any service exists: its folders, its log, its devices, its interpreter.

`main.py` calls these once, in this order, with the parsed arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy.devices.heap import HEAP

if TYPE_CHECKING:
    from comfy_server import LogCapture

PROGRAM_FOLDER = Path(__file__).resolve().parent.parent
SWITCH_INTERVAL_S = 0.001

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Ends the process in words where the block fails for what lies outside of the program.

    Args:
        kinds: Exceptions whose text says what is wrong and how to mend it.
    Raises:
        SystemExit: One of them was raised.
    """
    try:
        yield
    except kinds as error:
        logger.debug("the start failed", exc_info=True)
        sys.exit(f"latentloom cannot start: {error}")


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """While the block holds the event loop, Ctrl-C ends the program at once.

    The loop's own way would be to wait for its next turn, which a pack that hangs never gives.
    """
    after: Any = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        after = signal.SIG_IGN  # the supervisor passes on what the terminal has sent here as well
        sys.exit("stopped while packs were loading")
    finally:
        signal.signal(signal.SIGINT, after)


def configure_folders(args: argparse.Namespace, *, clear_temp: bool = True) -> None:
    """Points `folder_paths` at the folders of the arguments and creates those that are missing.

    Args:
        clear_temp: Whether temporary files of an earlier process go.
    """
    for value, place in (
        (args.base_directory, folder_paths.set_base_directory),
        (args.models_directory, folder_paths.set_models_directory),
        (args.output_directory, folder_paths.set_output_directory),
        (args.input_directory, folder_paths.set_input_directory),
        (args.user_directory, folder_paths.set_user_directory),
    ):
        if value:
            place(value)
    folder_paths.set_date_format(args.date_output_format if args.date_based_output else None)
    if args.temp_directory:
        folder_paths.set_temp_directory(os.path.join(args.temp_directory, "temp"))
    for category in ("checkpoints", "text_encoders", "vae", "diffusion_models", "loras"):
        folder = os.path.join(folder_paths.get_output_directory(), category)
        folder_paths.add_model_folder_path(category, folder)

    for category in ("checkpoints", "loras"):  # what comes with the program works from anywhere
        folder_paths.add_model_folder_path(category, str(PROGRAM_FOLDER / "models" / category))

    extra = [path for paths in args.extra_model_paths_config or [] for path in paths]
    beside = PROGRAM_FOLDER / "extra_model_paths.yaml"
    for config in [*([str(beside)] if beside.is_file() else []), *extra]:
        from utils.extra_config import load_extra_path_config  # brings a YAML parser with it

        load_extra_path_config(config)

    if clear_temp:
        shutil.rmtree(folder_paths.get_temp_directory(), ignore_errors=True)
    for folder in (
        folder_paths.get_output_directory(),
        folder_paths.get_input_directory(),
        folder_paths.get_temp_directory(),
        folder_paths.get_user_directory(),
        *default_user_folders(args),
        *folder_paths.get_folder_paths("custom_nodes"),
    ):
        _make_folder(folder)


def _make_folder(folder: str) -> None:
    """Creates a folder unless it is there; raises OSError with words about it."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the folder {folder} cannot be made: {error.strerror}; name another with "
            "--base-directory or the option for this one, or mend what is in its place"
        ) from error


def default_user_folders(args: argparse.Namespace) -> list[str]:
    """Folders in which the editor looks at every start; it reports each missing one as an error."""
    if args.multi_user or args.auth:
        return []
    user = os.path.join(folder_paths.get_user_directory(), "default")
    return [os.path.join(user, name) for name in ("workflows", "subgraphs", "keybindings")]


def configure_logging(args: argparse.Namespace) -> LogCapture:
    """Sends log lines to the standard streams and keeps the last ones for `/internal/logs`."""
    from comfy_server import LogCapture

    capture = LogCapture()
    sys.stdout, sys.stderr = capture.wrap(sys.stdout), capture.wrap(sys.stderr)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if args.log_stdout:
        normal = logging.StreamHandler(sys.stdout)
        normal.addFilter(lambda record: record.levelno < logging.ERROR)
        handlers[0].setLevel(logging.ERROR)
        handlers.append(normal)
    for handler in handlers:
        handler.setLevel(max(handler.level, logging.getLevelName(args.verbose)))
    for level, path in args.log_files:
        try:
            to_file = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise OSError(f"the log file {path} cannot be written: {error.strerror}") from error
        to_file.setLevel(level)
        handlers.append(to_file)
    lowest = min(handler.level for handler in handlers)
    logging.basicConfig(level=lowest, format="%(message)s", handlers=handlers, force=True)
    return capture


def choose_devices(args: argparse.Namespace) -> None:
    """Sets the variables that decide which devices exist; they count only before torch starts."""
    visible = None
    if args.default_device is not None:
        others = (str(index) for index in range(32) if index != args.default_device)
        visible = ",".join((str(args.default_device), *others))
    if args.cuda_device is not None:
        visible = str(args.cuda_device)
    if visible is not None:
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
            os.environ[name] = visible
    if args.oneapi_device_selector is not None:
        os.environ["ONEAPI_DEVICE_SELECTOR"] = args.oneapi_device_selector
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if args.cuda_malloc:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")


def prepare_interpreter(keep_pages: bool) -> None:
    """Sets it up for a process whose event loop shares it with busy threads.

    A thread that computes in Python gives it up after 1 ms instead of 5. Nothing is collected
    until `keep_for_good`: what is imported stays, and looking it through is a tenth of the start.
    When native code kills the process, the lines of Python that led there are written first.

    Args:
        keep_pages: Freed memory stays in the process while prompts run.
    """
    if keep_pages:
        HEAP.keep_pages()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__, all_threads=False)
    gc.disable()


def keep_for_good() -> None:
    """Takes everything made so far out of the collector's sight.

    With torch and the nodes loaded, a full collection would stop all threads for over 100 ms.
    """
    gc.freeze()
    gc.enable()
