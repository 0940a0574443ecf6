"""The node manager: a package of its own that main offers its moments when it is asked for.

`--enable-manager` names the package `comfyui_manager`, which is not installed with this program.
Whatever it raises costs the manager, not the server.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from typing import Protocol, cast

from aiohttp import web
from aiohttp.typedefs import Middleware

PACKAGE = "comfyui_manager"

logger = logging.getLogger(__name__)


class Package(Protocol):
    """What the package offers."""

    def prestartup(self) -> None:
        """Called before anything of a pack runs."""

    def start(self) -> None:
        """Called when the server object exists; adds routes."""

    def should_be_disabled(self, fullpath: str) -> bool:
        """Whether a pack must not be loaded beside the manager."""

    def create_middleware(self) -> Middleware:
        """The manager's own gate for the server's requests."""


class NodeManager:
    """The installed package, or nothing that does nothing.

    Attributes:
        package: The package; None when it was not asked for, is not installed or has failed.
        has_page: Whether its routes and its part of the page are wanted.
    """

    def __init__(self, package: Package | None, has_page: bool = True) -> None:
        self.package = package
        self.has_page = has_page

    def prepare(self) -> None:
        """Lets the package do what has to be done before packs run."""
        if self.package is not None:
            self._guarded("prestartup")

    def refuses(self, path: str) -> bool:
        """Whether the package wants the pack at `path` left out, such as an older self."""
        return self.package is not None and self.package.should_be_disabled(os.path.abspath(path))

    def start(self, app: web.Application) -> None:
        """Adds the package's routes and its gate; before packs load."""
        if self.package is None or not self.has_page:
            return
        if self._guarded("start"):
            app.middlewares.append(self.package.create_middleware())

    def _guarded(self, step: str) -> bool:
        try:
            getattr(self.package, step)()
        except Exception:  # a package of others: its mistakes are logged, and the server serves
            logger.exception("the node manager failed in %s() and is left out", step)
            self.package = None
            return False
        return True


def find_manager(args: argparse.Namespace) -> NodeManager:
    """The manager that the arguments ask for; one that does nothing if it cannot be had."""
    if not args.enable_manager:
        return NodeManager(None)
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError as error:
        if error.name == PACKAGE:
            logger.warning(
                "--enable-manager: the package comfyui-manager is not installed; "
                "'%s -m pip install comfyui-manager' does it",
                sys.executable,
            )
        else:
            logger.exception("--enable-manager: the package comfyui-manager cannot be imported")
        return NodeManager(None)
    return NodeManager(cast(Package, package), has_page=not args.disable_manager_ui)
