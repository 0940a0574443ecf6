"""What node packs and installed packages add to the page: scripts, texts, examples, blueprints."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import re
from collections.abc import Container, Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import folder_paths
from comfy_server.files import content_type
from comfy_server.miniatures import FORMATS, SOUNDS, miniature, monogram, silence
from comfy_server.paths import PathRefused, first_below, resolve_below
from comfy_server.template_list import TemplateList

logger = logging.getLogger(__name__)

OUR_EXTENSION = "latentloom"
EXAMPLE_FOLDERS = ("example_workflows", "example", "examples", "workflow", "workflows")
LOCALE_PARTS = ("main", "nodeDefs", "commands", "settings")
TEMPLATE_PACKAGES = tuple(
    f"comfyui_workflow_templates_{part}"
    for part in (
        "json",
        "media_api",
        "media_video",
        "media_image",
        "media_other",
        "media_assets_01",
        "media_assets_02",
    )
)
LOGO_INDEX = "index_logo.json"
HELP_PACKAGE = "comfyui_embedded_docs"


def package_folder(name: str, subfolder: str) -> Path | None:
    """A folder inside an installed package, found without importing it; None if not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / subfolder
    return folder if folder.is_dir() else None


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a pack's file; empty, with a log line, when it is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return {}
    return value if isinstance(value, dict) else {}


def _merge(target: dict[str, Any], addition: dict[str, Any]) -> None:
    for key, value in addition.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


class Packs:
    """Folders of packs, looked at on each request so that new files show without a restart.

    Attributes:
        web_directories: Pack name -> folder with browser scripts; main and packs add to it.
    """

    def __init__(self, frontend_root: Path | None, extension_root: Path | None) -> None:
        self.frontend_root = frontend_root
        self.web_directories: dict[str, str] = {}
        if extension_root is not None:
            self.web_directories[OUR_EXTENSION] = str(extension_root)
        self._template_roots: list[Path] | None = None
        self._templates = TemplateList(self.template_file)

    # -- browser scripts -----------------------------------------------------------------------

    def script_urls(self) -> list[str]:
        """URL paths of every script the page loads as an extension."""
        urls: list[str] = []
        if self.frontend_root is not None:
            core = self.frontend_root / "extensions"
            urls += [f"/extensions/{path}" for path in _scripts(core)]
        for name, folder in self.web_directories.items():
            urls += [f"/extensions/{quote(name)}/{path}" for path in _scripts(Path(folder))]
        return urls

    def extension_file(self, name: str, relative: str) -> Path | None:
        """A file of a pack's web folder."""
        folder = self.web_directories.get(name)
        return None if folder is None else first_below([folder], relative)

    def frontend_file(self, relative: str) -> Path | None:
        """A file of the editor."""
        return None if self.frontend_root is None else first_below([self.frontend_root], relative)

    def is_frontend_folder(self, relative: str) -> bool:
        """Whether a path names a folder of the editor, which is not listed."""
        if self.frontend_root is None:
            return False
        try:
            return resolve_below(self.frontend_root, relative).is_dir()
        except PathRefused:
            return False

    # -- folders of packs ----------------------------------------------------------------------

    def folders(self) -> Iterator[Path]:
        """The folder of each installed pack, by name."""
        for root in folder_paths.get_folder_paths("custom_nodes"):
            if Path(root).is_dir():
                for entry in sorted(Path(root).iterdir()):
                    if entry.is_dir() and not entry.name.endswith((".disabled", "__pycache__")):
                        yield entry

    def workflow_templates(self) -> dict[str, list[str]]:
        """Pack name -> names of its example workflows."""
        found: dict[str, list[str]] = {}
        for folder in self.folders():
            for sub in EXAMPLE_FOLDERS:
                names = [path.stem for path in sorted((folder / sub).glob("*.json"))]
                if names:
                    found.setdefault(folder.name, []).extend(names)
        return found

    def workflow_template_file(self, pack: str, relative: str) -> Path | None:
        """An example workflow or its thumbnail."""
        roots = [
            folder / sub
            for folder in self.folders()
            if folder.name == pack
            for sub in EXAMPLE_FOLDERS
        ]
        return first_below(roots, relative)

    def workflow_template_substitute(self, pack: str, relative: str) -> bytes | None:
        """The graph of an example workflow, drawn under the name of its absent thumbnail."""
        stem, suffix = _stem_and_suffix(relative)
        path = self.workflow_template_file(pack, f"{stem}.json") if suffix in FORMATS else None
        return None if path is None else miniature(path, suffix)

    def translations(self) -> dict[str, Any]:
        """Language -> texts, merged over all packs; later packs win."""
        merged: dict[str, Any] = {}
        for folder in self.folders():
            for language in sorted((folder / "locales").glob("*/")):
                texts = merged.setdefault(language.name, {})
                for part in LOCALE_PARTS:
                    path = language / f"{part}.json"
                    if path.is_file():
                        content = _read_object(path)
                        _merge(texts, content if part == "main" else {part: content})
        return merged

    def subgraphs(self) -> dict[str, tuple[dict[str, Any], Path]]:
        """Blueprint id -> (its public entry, its file)."""
        found = {}
        for folder in self.folders():
            for path in sorted((folder / "subgraphs").glob("*.json")):
                found[_blueprint_id("custom_node", path)] = (
                    {
                        "source": "custom_node",
                        "name": path.stem,
                        "info": {"node_pack": f"custom_nodes.{folder.name}"},
                    },
                    path,
                )
        for path in sorted(Path(folder_paths.base_path, "blueprints").glob("*.json")):
            entry = {"source": "templates", "name": path.stem, "info": {"node_pack": "latentloom"}}
            found[_blueprint_id("templates", path)] = (entry, path)
        return found

    # -- installed packages --------------------------------------------------------------------

    def template_file(self, relative: str) -> Path | None:
        """A workflow template, its index or its picture, from the installed template packages."""
        if self._template_roots is None:
            folders = [package_folder(name, "templates") for name in TEMPLATE_PACKAGES]
            self._template_roots = [folder for folder in folders if folder is not None]
        return first_below(self._template_roots, relative)

    def template_index(self, relative: str, known: Container[str]) -> list[dict[str, Any]] | None:
        """An index of the templates whose nodes are all `known`; None if it is no such file."""
        path = self.template_file(relative)
        return None if path is None else self._templates.index(path, known)

    def template_substitute(self, relative: str) -> tuple[bytes, str] | None:
        """Content and type of what stands in for an absent thumbnail, sound or logo."""
        stem, suffix = _stem_and_suffix(relative)
        if stem.startswith("logo/"):
            return self._logo_substitute(relative, suffix)
        numbered = re.fullmatch(r"(.+)-\d", stem)
        path = self.template_file(f"{numbered[1]}.json") if numbered else None
        if path is None:
            return None
        if suffix in SOUNDS:
            return silence(), "audio/wav"
        content = miniature(path, suffix) if suffix in FORMATS else None
        return None if content is None else (content, content_type(relative))

    def _logo_substitute(self, relative: str, suffix: str) -> tuple[bytes, str] | None:
        index = self.template_file(LOGO_INDEX)
        makers = {} if index is None else _read_object(index)
        maker = next((maker for maker, logo in makers.items() if logo == relative), None)
        if maker is None or suffix not in FORMATS:
            return None
        return monogram(maker, suffix), content_type(relative)

    def help_file(self, relative: str) -> Path | None:
        """A page of the built-in nodes' help."""
        folder = package_folder(HELP_PACKAGE, "docs")
        return None if folder is None else first_below([folder], relative)


def _scripts(folder: Path) -> list[str]:
    """Relative URL paths of all scripts below a folder, sorted."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.js"))
    return [quote(path) for path in found]


def _stem_and_suffix(relative: str) -> tuple[str, str]:
    path = PurePosixPath(relative)
    return path.with_suffix("").as_posix() if path.name else "", path.suffix.lower()


def _blueprint_id(source: str, path: Path) -> str:
    return hashlib.sha256(f"{source}{path}".encode()).hexdigest()
