"""Reads YAML files that name additional model folders (`extra_model_paths.yaml`)."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import yaml

import folder_paths

logger = logging.getLogger(__name__)


def _expand(path: str, relative_to: Path) -> str:
    """Absolute, normalised path with variables and `~` expanded."""
    expanded = os.path.expandvars(os.path.expanduser(path))
    return os.path.normpath(os.path.join(relative_to, expanded))


def _add_section(name: str, section: dict[str, Any], yaml_folder: Path) -> None:
    base = section.get("base_path")
    root = Path(_expand(str(base), yaml_folder)) if base else yaml_folder
    is_default = bool(section.get("is_default", False))
    for folder_name, paths in section.items():
        if folder_name in ("base_path", "is_default") or paths is None:
            continue
        lines = [line.strip() for line in str(paths).splitlines() if line.strip()]
        # each default goes to the very front, so the last one added must be the first one written
        for line in reversed(lines) if is_default else lines:
            directory = _expand(line, root)
            note = "" if os.path.isdir(directory) else " (there is no such folder)"
            logger.info("section %s adds the %s folder %s%s", name, folder_name, directory, note)
            folder_paths.add_model_folder_path(str(folder_name), directory, is_default)


def load_extra_path_config(yaml_path: str) -> None:
    """Adds every folder that a YAML file names to the table of `folder_paths`.

    Each section is a mapping: `base_path` (a relative one is taken from the file's folder),
    `is_default` (its folders go first) and category -> one path per line.

    Raises:
        ValueError: the file is not YAML, or not a mapping of sections to mappings.
        OSError: the file cannot be read.
    """
    source = Path(yaml_path)
    try:
        document = yaml.safe_load(source.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{yaml_path} is not valid YAML: {error}") from error
    except OSError as error:
        raise OSError(
            f"the file of model folders {yaml_path} cannot be read: {error.strerror}"
        ) from error
    if document is None:
        return
    if not isinstance(document, dict):
        raise ValueError(f"{yaml_path}: expected sections, found {type(document).__name__}")
    for name, section in document.items():
        if section is None:
            continue
        if not isinstance(section, dict):
            raise ValueError(
                f"{yaml_path}: section {name!r} must map folder names to paths, "
                f"found {type(section).__name__}"
            )
        _add_section(str(name), section, source.resolve().parent)
