"""Finds and loads node packs: folders and single files below `custom_nodes`.

A pack is a Python module that offers `NODE_CLASS_MAPPINGS`, or a `comfy_entrypoint` that returns an
extension with a list of nodes, or only files for the browser. A pack that fails, in whatever way,
is logged and skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import folder_paths
from comfy_nodes.public_modules import import_public_modules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger(__name__)

EXTENSION_WEB_DIRS: dict[str, str] = {}
"""Folder of browser files by pack name; served below /extensions/<name>/."""

LOADED_MODULE_DIRS: dict[str, str] = {}
"""Absolute folder of each loaded pack by its name."""

IMPORT_FAILED: dict[str, str] = {}
"""Traceback by path of packs that failed in this run."""

SLOW_S = 10.0
"""A pack that loads for longer is named, in case that it never ends."""


@dataclass(frozen=True)
class PackSelection:
    """Which packs are loaded.

    Attributes:
        disabled: Load none but those in `allowed`.
        allowed: Names of packs that load although others are disabled.
        is_refused: Says of a path that its pack is not to be loaded.
    """

    disabled: bool = False
    allowed: tuple[str, ...] = ()
    is_refused: Callable[[str], bool] = lambda _: False

    def accepts(self, path: str) -> bool:
        """Whether the pack at this file or folder is to be loaded."""
        is_wanted = not self.disabled or os.path.basename(path) in self.allowed
        return is_wanted and not self.is_refused(path)


def pack_paths(selection: PackSelection = PackSelection()) -> list[str]:
    """Paths of the packs to load, in a stable order: the folders of `custom_nodes`, names
    sorted.
    """
    found = []
    for folder in folder_paths.get_folder_paths("custom_nodes"):
        if not os.path.isdir(folder):
            continue
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if _is_pack(path) and selection.accepts(path):
                found.append(path)
    return found


def _is_pack(path: str) -> bool:
    name = os.path.basename(path)
    if name == "__pycache__" or name.startswith(".") or name.endswith(".disabled"):
        return False
    return os.path.isdir(path) or name.endswith(".py")


def run_prestartup_scripts(selection: PackSelection = PackSelection()) -> None:
    """Runs the `prestartup_script.py` of each pack; main calls it before anything heavy is
    imported.
    """
    for path in pack_paths(selection):
        script = os.path.join(path, "prestartup_script.py")
        if not os.path.isfile(script):
            continue
        started = time.perf_counter()
        try:
            with _named_when_slow(script):
                _execute(f"{_module_name(path)}.prestartup_script", script)
        except BaseException as error:
            _reraise_if_stopping(error)
            logger.exception("prestartup script of %s failed", path)
        else:
            logger.info("prestartup script of %s: %.1f s", path, time.perf_counter() - started)


@contextlib.contextmanager
def _named_when_slow(path: str) -> Iterator[None]:
    """Says which pack is at work in the block when that takes long."""

    def say() -> None:
        logger.warning(
            "%s has been loading for %.0f s; the server starts when it is done. If it never is, "
            "stop the server and move the pack out of its folder",
            path,
            SLOW_S,
        )

    timer = threading.Timer(SLOW_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


async def init_external_custom_nodes(
    add_nodes: Callable[[Mapping[str, Any], Mapping[str, str]], None],
    taken: Iterable[str],
    selection: PackSelection = PackSelection(),
) -> list[str]:
    """Loads all packs.

    Args:
        add_nodes: Takes a pack's node classes and display names into the node table.
        taken: Names of built-in nodes; a pack cannot replace one of them.

    Returns:
        Paths of the packs that failed.
    """
    reserved = frozenset(taken)
    failed = []
    paths = pack_paths(selection)
    if paths:
        import_public_modules()
    for path in paths:
        started = time.perf_counter()
        with _named_when_slow(path):
            loaded = await load_custom_node(path, reserved, add_nodes=add_nodes)
        outcome = "" if loaded else " (failed)"
        logger.info("pack %s: %.1f s%s", path, time.perf_counter() - started, outcome)
        if not loaded:
            failed.append(path)
    return failed


async def load_custom_node(
    module_path: str,
    ignore: Iterable[str] = (),
    module_parent: str = "custom_nodes",
    *,
    add_nodes: Callable[[Mapping[str, Any], Mapping[str, str]], None],
) -> bool:
    """Loads one pack.

    Args:
        module_path: Folder with an `__init__.py`, or a `.py` file.
        ignore: Names of nodes that must not be replaced.
        module_parent: First part of the name that the node listing shows as `python_module`.
        add_nodes: Takes node classes and display names into the node table.

    Returns:
        Whether the module could be imported and offers something.
    """
    name = get_module_name(module_path)
    try:
        module = import_pack(module_path)
        LOADED_MODULE_DIRS[name] = _pack_folder(module_path)
        note_web_directory(name, module, module_path)
        nodes, titles = await offered_nodes(module)
        accepted = _usable(nodes or {}, frozenset(ignore), f"{module_parent}.{name}")
    except BaseException as error:  # noqa: BLE001 - a pack may even call exit(); go on
        _reraise_if_stopping(error)
        IMPORT_FAILED[module_path] = traceback.format_exc()
        logger.warning(
            "cannot load pack %s; it is skipped\n%s%s",
            module_path,
            IMPORT_FAILED[module_path],
            _remedy(error, _pack_folder(module_path)),
        )
        return False
    if nodes is None:
        if name in EXTENSION_WEB_DIRS:
            return True
        logger.warning(
            "pack %s offers no NODE_CLASS_MAPPINGS, comfy_entrypoint or WEB_DIRECTORY; skipped",
            module_path,
        )
        return False
    add_nodes(accepted, titles)
    return True


def _usable(nodes: Mapping[str, Any], reserved: frozenset[str], origin: str) -> dict[str, Any]:
    """The nodes of a pack that can be offered, marked with where they come from.

    What is no node, such as the None that a pack puts in the place of a class it could not import,
    is logged and left out; the others are kept.
    """
    usable = {}
    for name, node in nodes.items():
        if name in reserved:
            continue
        is_node = hasattr(node, "INPUT_TYPES") or hasattr(node, "GET_SCHEMA")
        if not isinstance(name, str) or not is_node:
            logger.warning(
                "%s: node %r is left out; expected a name and a class with INPUT_TYPES, found %r",
                origin,
                name,
                node,
            )
            continue
        node.RELATIVE_PYTHON_MODULE = origin
        usable[name] = node
    return usable


def _remedy(error: BaseException, folder: str) -> str:
    """What to do where a pack needs a package that is not installed; else nothing."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not missing.isidentifier() or importlib.util.find_spec(missing) is not None:
        return ""
    listed = os.path.join(folder, "requirements.txt")
    what = f'-r "{listed}"' if os.path.isfile(listed) else missing
    return (
        f"{missing} is not installed; the pack's author says what it needs. Often this brings it: "
        f'"{sys.executable}" -m pip install {what}'
    )


def import_pack(module_path: str) -> ModuleType:
    """Imports a pack under a name made of its path, so that it finds its own sub-modules.

    Raises:
        FileNotFoundError: A folder without `__init__.py`.
    """
    is_file = os.path.isfile(module_path)
    source = module_path if is_file else os.path.join(module_path, "__init__.py")
    if not os.path.isfile(source):
        raise FileNotFoundError(f"{module_path} holds no __init__.py, so it is no node pack")
    return _execute(_module_name(module_path), source)


def get_module_name(module_path: str) -> str:
    """Name of a pack: its folder or file name without suffix."""
    base = os.path.basename(os.path.normpath(module_path))
    return os.path.splitext(base)[0] if os.path.isfile(module_path) else base


def note_web_directory(name: str, module: ModuleType, module_path: str) -> None:
    """Records the folder of a pack's browser files, if it has one.

    The folder is named by `WEB_DIRECTORY` in the module or by `[tool.comfy] web` in the pack's
    `pyproject.toml` (then under the project's name).
    """
    folder = _pack_folder(module_path)
    project = _project_settings(folder)
    web = project.get("tool", {}).get("comfy", {}).get("web")
    if web:
        _add_web_directory(project.get("project", {}).get("name", name), folder, web)
    declared = getattr(module, "WEB_DIRECTORY", None)
    if isinstance(declared, str | os.PathLike):
        _add_web_directory(name, folder, declared)
    elif declared is not None:
        logger.warning("WEB_DIRECTORY of %s is no path: %r", module_path, declared)


def _add_web_directory(name: str, folder: str, relative: str | os.PathLike[str]) -> None:
    path = os.path.abspath(os.path.join(folder, relative))
    if os.path.isdir(path):
        EXTENSION_WEB_DIRS[name] = path


def _pack_folder(module_path: str) -> str:
    folder = os.path.dirname(module_path) if os.path.isfile(module_path) else module_path
    return os.path.abspath(folder)


def _project_settings(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, "pyproject.toml")
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, "rb") as file:
            settings: dict[str, Any] = tomllib.load(file)
    except (OSError, ValueError) as error:  # also what is not UTF-8
        logger.warning("cannot read %s: %s", path, error)
        return {}
    return settings


def _module_name(module_path: str) -> str:
    """Name in `sys.modules`: the path, with dots replaced so that it is one name."""
    stem = os.path.splitext(module_path)[0] if os.path.isfile(module_path) else module_path
    return stem.replace(".", "_x_")


def _execute(name: str, source: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _mapping(module: ModuleType, name: str) -> Mapping[str, Any] | None:
    """A pack's table of that name; None where it has none, or none of this kind."""
    found = getattr(module, name, None)
    if found is None or isinstance(found, Mapping):
        return found
    logger.warning("%s of %s is no dict: %r", name, module.__name__, found)
    return None


async def offered_nodes(
    module: ModuleType,
) -> tuple[Mapping[str, Any] | None, Mapping[str, str]]:
    """Node classes and display names of a pack; None for a pack without nodes."""
    nodes = _mapping(module, "NODE_CLASS_MAPPINGS")
    if nodes is not None:
        titles = _mapping(module, "NODE_DISPLAY_NAME_MAPPINGS") or {}
        return nodes, {name: title for name, title in titles.items() if isinstance(title, str)}
    entrypoint = getattr(module, "comfy_entrypoint", None)
    if entrypoint is None:
        return None, {}
    extension = entrypoint()
    if inspect.isawaitable(extension):
        extension = await extension
    await extension.on_load()
    return _schema_nodes(await extension.get_node_list())


def _schema_nodes(classes: Iterable[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Node table entries of nodes that describe themselves by a schema.

    A node whose schema is wrong is logged and left out; its siblings are kept.

    Raises:
        ValueError: There are nodes, and the schema of not one of them is right.
    """
    nodes: dict[str, Any] = {}
    titles: dict[str, str] = {}
    wrong: list[str] = []
    for node in classes:
        name = getattr(node, "__name__", repr(node))
        try:
            schema = node.GET_SCHEMA()
        except Exception as error:
            wrong.append(f"{name}: {error}")
            logger.exception("the schema of node %s is wrong; it is left out", name)
            continue
        nodes[schema.node_id] = node
        if schema.display_name is not None:
            titles[schema.node_id] = schema.display_name
    if wrong and not nodes:
        raise ValueError(f"no node has a right schema: {'; '.join(wrong)}")
    return nodes, titles


def _reraise_if_stopping(error: BaseException) -> None:
    """Lets the person at the keyboard stop the program while packs load."""
    if isinstance(error, KeyboardInterrupt):
        raise error
