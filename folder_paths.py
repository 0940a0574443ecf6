"""Where models, inputs, outputs and user files live, and which model files there are.

One table, `folder_names_and_paths`, maps a category to (directories, file suffixes). Node packs
extend and replace its entries while they load, so every function here reads it afresh. The
directories start below the folder that holds this file; main moves them with `set_...` functions
before any node is loaded. Importing this module creates nothing and reads nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar

from utils.day_folder import day_folder, folder_of_today
from utils.file_listing import (  # noqa: F401  some of these are only public names here
    CATEGORIES,
    SUBFOLDERS,
    SUFFIXES,
    VIEWS,
    extension_mimetypes_cache,
    fill_tokens,
    filter_files_content_types,
    filter_files_extensions,
    highest_counter,
    recursive_search,
    supported_pt_extensions,
)
from utils.save_turns import take_turn
from utils.user_scope import (  # noqa: F401
    require_room,
    scope_uses,
    scoped,
    scoped_user,
    user_scope,
)

logger = logging.getLogger(__name__)

FolderEntry = tuple[list[str], set[str]]
CachedListing = tuple[list[str], dict[str, float], float]

SYSTEM_USER_PREFIX = "__"
LEGACY_FOLDER_NAMES = {"unet": "diffusion_models", "clip": "text_encoders"}

base_path: str = os.path.dirname(os.path.abspath(__file__))
models_dir: str = os.path.join(base_path, "models")
output_directory: str = os.path.join(base_path, "output")
temp_directory: str = os.path.join(base_path, "temp")
input_directory: str = os.path.join(base_path, "input")
user_directory: str = os.path.join(base_path, "user")
date_format: str | None = None

folder_names_and_paths: dict[str, FolderEntry] = {}
filename_list_cache: dict[str, CachedListing] = {}

# Set while one request lists many nodes: each category is then looked at once, not once per node.
_checked_in_scope: ContextVar[set[str] | None] = ContextVar("checked_in_scope", default=None)


# Directories


def _default_entry(name: str) -> FolderEntry:
    suffixes = SUFFIXES.get(name, supported_pt_extensions)
    if name == "custom_nodes":
        return [os.path.join(base_path, name)], suffixes
    return [os.path.join(models_dir, sub) for sub in SUBFOLDERS.get(name, (name,))], suffixes


def _rebuild_default_entries(previous: dict[str, FolderEntry]) -> None:
    """Points the built-in categories at the current folders; keeps directories added by others."""
    for name in CATEGORIES:
        directories, suffixes = _default_entry(name)
        if name in folder_names_and_paths:
            known = {*previous[name][0], *directories}
            entry = folder_names_and_paths[name]
            directories += [directory for directory in entry[0] if directory not in known]
            suffixes = entry[1]
        folder_names_and_paths[name] = (directories, suffixes)
    for name, of in VIEWS.items():
        folder_names_and_paths[name] = (folder_names_and_paths[of][0], SUFFIXES[name])
    filename_list_cache.clear()


_rebuild_default_entries({})


def set_base_directory(path: str) -> None:
    """Moves every directory (models, custom_nodes, input, output, temp, user) below `path`."""
    global base_path, models_dir, output_directory, temp_directory, input_directory, user_directory
    previous = {name: _default_entry(name) for name in CATEGORIES}
    base_path = os.path.abspath(path)
    models_dir = os.path.join(base_path, "models")
    output_directory = os.path.join(base_path, "output")
    temp_directory = os.path.join(base_path, "temp")
    input_directory = os.path.join(base_path, "input")
    user_directory = os.path.join(base_path, "user")
    _rebuild_default_entries(previous)


def set_models_directory(path: str) -> None:
    """Moves the model folders below `path`."""
    global models_dir
    previous = {name: _default_entry(name) for name in CATEGORIES}
    models_dir = os.path.abspath(path)
    _rebuild_default_entries(previous)


def set_output_directory(output_dir: str) -> None:
    """Sets the folder results are written to."""
    global output_directory
    output_directory = os.path.abspath(output_dir)


def set_temp_directory(temp_dir: str) -> None:
    """Sets the folder of previews and other short-lived files; emptied at start and exit."""
    global temp_directory
    temp_directory = os.path.abspath(temp_dir)


def set_input_directory(input_dir: str) -> None:
    """Sets the folder of uploads and of the files loader nodes list."""
    global input_directory
    input_directory = os.path.abspath(input_dir)


def set_user_directory(user_dir: str) -> None:
    """Sets the folder that holds one sub-folder per user."""
    global user_directory
    user_directory = os.path.abspath(user_dir)


def set_date_format(text: str | None) -> None:
    """Has results saved in a sub-folder of the day, for instance `%Y-%m-%d`; None: in none.

    Raises:
        ValueError: what the format stands for is no folder below the output folder.
    """
    global date_format
    if text is not None:
        folder_of_today(text)
    date_format = text


def get_output_directory() -> str:
    """Folder results are written to; inside `user_scope` the user's part of it."""
    return scoped(output_directory)


def get_temp_directory() -> str:
    """Folder of previews and other short-lived files; scoped as the output directory."""
    return scoped(temp_directory)


def get_input_directory() -> str:
    """Folder of uploads; scoped as the output directory."""
    return scoped(input_directory)


def get_user_directory() -> str:
    """Folder that holds one sub-folder per user."""
    return user_directory


def get_system_user_directory(name: str = "system") -> str:
    """Private folder `<user>/__<name>`, which no HTTP route reaches.

    Raises:
        ValueError: `name` is empty, starts with an underscore, or is not letters, digits, `_`.
    """
    if not name or name.startswith("_") or not name.replace("_", "").isalnum():
        raise ValueError(
            f"system user name {name!r} is not valid: use letters, digits and inner underscores"
        )
    return os.path.join(get_user_directory(), f"{SYSTEM_USER_PREFIX}{name}")


def get_public_user_directory(user_id: str) -> str | None:
    """Folder of a user, or None for ids reserved for the server itself."""
    if not user_id or user_id.startswith(SYSTEM_USER_PREFIX):
        return None
    return os.path.join(get_user_directory(), user_id)


def get_directory_by_type(type_name: str) -> str | None:
    """Directory of `output`, `temp` or `input`; None for any other name."""
    directories = {"output": output_directory, "temp": temp_directory, "input": input_directory}
    return scoped(directories[type_name]) if type_name in directories else None


def get_input_subfolders() -> list[str]:
    """Relative paths, with `/`, of all folders below the input directory, sorted."""
    root = get_input_directory()
    found = (os.path.relpath(folder, root) for folder, _, _ in os.walk(root))
    return sorted(name.replace(os.sep, "/") for name in found if name != ".")


# Names that come from outside


def confine(root: str, name: str) -> str:
    """Resolves `name` below `root`, links included: the one check for paths from outside.

    Args:
        root: Directory that must not be left; may itself be a link.
        name: Relative path. An absolute one is accepted only if it lies below `root`.
    Returns:
        Absolute path without links.
    Raises:
        ValueError: the name holds a NUL byte, or leads outside `root`.
    """
    if "\0" in name:
        raise ValueError("a file name must not hold a NUL byte")
    real_root = os.path.realpath(root)
    resolved = os.path.realpath(os.path.join(real_root, name))
    if resolved != real_root and not resolved.startswith(os.path.join(real_root, "")):
        folder = os.path.basename(real_root)
        raise ValueError(f"{name!r} leads outside the folder {folder!r}; use a name below it")
    return resolved


def annotated_filepath(name: str) -> tuple[str, str | None]:
    """Splits `picture.png [output]` into the bare name and the directory it selects, if any."""
    for kind in ("output", "input", "temp"):
        suffix = f" [{kind}]"
        if name.endswith(suffix):
            return name[: -len(suffix)], get_directory_by_type(kind)
        if name.endswith(suffix[1:]):  # written without the space by some packs
            return name[: -len(suffix) + 1], get_directory_by_type(kind)
    return name, None


def get_annotated_filepath(name: str, default_dir: str | None = None) -> str:
    """Absolute path of a name that may carry ` [input]`, ` [output]` or ` [temp]`.

    Raises:
        ValueError: the name leads outside the directory it selects.
    """
    bare, directory = annotated_filepath(name)
    return confine(directory or default_dir or get_input_directory(), bare)


def exists_annotated_filepath(name: str) -> bool:
    """Whether there is such a file; not one outside, a folder, or what is no name."""
    try:
        return isinstance(name, str) and os.path.isfile(get_annotated_filepath(name))
    except ValueError:
        return False


# Model folders and file lists


def map_legacy(folder_name: str) -> str:
    """Current name of a category (`unet` -> `diffusion_models`, `clip` -> `text_encoders`)."""
    return LEGACY_FOLDER_NAMES.get(folder_name, folder_name)


def add_model_folder_path(
    folder_name: str, full_folder_path: str, is_default: bool = False
) -> None:
    """Adds a directory to a category, at the front when `is_default`; makes the category if new."""
    folder_name = map_legacy(folder_name)
    directories = folder_names_and_paths.setdefault(folder_name, ([], set()))[0]
    if full_folder_path in directories:
        if not is_default:
            return
        directories.remove(full_folder_path)
    directories.insert(0 if is_default else len(directories), full_folder_path)
    for name in (folder_name, *(view for view in VIEWS if VIEWS[view] == folder_name)):
        filename_list_cache.pop(name, None)


def get_folder_paths(folder_name: str) -> list[str]:
    """Directories of a category (a copy); raises KeyError for an unknown one."""
    return list(folder_names_and_paths[map_legacy(folder_name)][0])


@contextlib.contextmanager
def cached_filename_lists() -> Iterator[None]:
    """Inside, each category is checked for changes at most once (used to list all nodes)."""
    token = _checked_in_scope.set(set())
    try:
        yield
    finally:
        _checked_in_scope.reset(token)


def _is_current(folder_name: str, listing: CachedListing) -> bool:
    """Whether no folder of the listing changed and no existing directory is missing from it."""
    folders = listing[1]
    try:
        if any(os.path.getmtime(folder) != mtime for folder, mtime in folders.items()):
            return False
    except OSError:
        return False
    return all(
        directory in folders or not os.path.isdir(directory)
        for directory in folder_names_and_paths[folder_name][0]
    )


def listing_stamp() -> tuple[object, ...]:
    """Differs from an earlier one when a category was listed anew, or has changed since."""
    cached = list(filename_list_cache.items())
    return tuple((name, row[2], _is_current(name, row)) for name, row in cached)


def _list_category(folder_name: str) -> CachedListing:
    directories, extensions = folder_names_and_paths[folder_name][:2]
    names: set[str] = set()
    folders: dict[str, float] = {}
    for directory in directories:
        found, visited = recursive_search(directory)
        names.update(filter_files_extensions(found, extensions))
        folders.update(visited)
    return sorted(names), folders, time.perf_counter()


def get_filename_list(folder_name: str) -> list[str]:
    """Sorted file names of a category, relative to its directories (a fresh list).

    Raises:
        KeyError: the category is unknown.
    """
    folder_name = map_legacy(folder_name)
    if folder_name not in folder_names_and_paths:
        raise KeyError(f"no model folder {folder_name!r}; known: {sorted(folder_names_and_paths)}")
    checked = _checked_in_scope.get()
    listing = filename_list_cache.get(folder_name)
    unchecked = checked is None or folder_name not in checked
    if listing is None or (unchecked and not _is_current(folder_name, listing)):
        listing = filename_list_cache[folder_name] = _list_category(folder_name)
    if checked is not None:
        checked.add(folder_name)
    return list(listing[0])


def get_full_path(folder_name: str, filename: str) -> str | None:
    """Path of a model file in the first directory of its category that has it, else None.

    Links below the directories are followed (model collections are often linked in), but a name
    that climbs out of them is treated as absent.
    """
    entry = folder_names_and_paths.get(map_legacy(folder_name))
    if entry is None or "\0" in filename:
        return None
    relative = os.path.relpath(os.path.join(os.sep, filename), os.sep)
    for directory in entry[0]:
        candidate = os.path.join(directory, relative)
        if os.path.isfile(candidate):
            return candidate
        if os.path.islink(candidate):
            logger.warning("%s is a link to a file that does not exist; skipped", candidate)
    return None


def get_full_path_or_raise(folder_name: str, filename: str) -> str:
    """As `get_full_path`, but raises FileNotFoundError with the places that were searched."""
    if (path := get_full_path(folder_name, filename)) is not None:
        return path
    entry = folder_names_and_paths.get(map_legacy(folder_name))
    places = ", ".join(entry[0]) if entry else "no folder of that name"
    raise FileNotFoundError(
        f"no file {filename!r} in the model folder {folder_name!r}; searched: {places}"
    )


# Names of saved files


def get_save_image_path(
    filename_prefix: str, output_dir: str, image_width: int = 0, image_height: int = 0
) -> tuple[str, str, int, str, str]:
    """Where the next file of a prefix goes; creates the folder.

    Args:
        filename_prefix: May hold `/` for sub-folders and the tokens `%width% %height% %year%
            %month% %day% %hour% %minute% %second%`. With `set_date_format` it goes below the
            folder of the day.
        output_dir: Directory that must not be left.
    Returns:
        (folder, file name without counter, next free counter, sub-folder, filled prefix).
    Raises:
        ValueError: the prefix leads outside `output_dir`.
        OSError: the user whose prompt runs has no room for further files.
    """
    require_room()
    filename_prefix = fill_tokens(filename_prefix, image_width, image_height)
    model_folders = [place for row in folder_names_and_paths.values() for place in row[0]]
    day = day_folder(date_format, filename_prefix, output_dir, output_directory, model_folders)
    subfolder, filename = os.path.split(os.path.normpath(filename_prefix))
    confine(os.path.join(output_dir, day), subfolder)
    subfolder, filename_prefix = os.path.join(day, subfolder), os.path.join(day, filename_prefix)
    subfolder = os.path.normpath(subfolder) if subfolder else ""
    folder = os.path.join(output_dir, subfolder)
    os.makedirs(folder, exist_ok=True)
    take_turn(folder, filename)
    return folder, filename, highest_counter(folder, filename) + 1, subfolder, filename_prefix
