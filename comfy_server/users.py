"""Who asks, and where their settings and files are.

Three modes: one user called `default`; several users told apart by the `comfy-user` header, which
is a claim and no credential; and, with authentication on, the user the credentials belong to.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from comfy_server.paths import PathRefused, resolve_below
from comfy_server.services import USER
from comfy_server.user_files import write_atomically
from folder_paths import SYSTEM_USER_PREFIX

logger = logging.getLogger(__name__)

DEFAULT_USER = "default"
EDITOR_FOLDERS = ("workflows", "subgraphs", "keybindings")
SETTINGS_FILE = "comfy.settings.json"
MAX_USER_NAME = 100
PROTOTYPE = "__proto__"  # scripts that copy such a key change what all their objects inherit


class UnknownUserError(KeyError):
    """The request names no known user; answered with 401."""


class UserNameRefused(ValueError):
    """A new user's name is not acceptable."""


class UserManager:
    """Users and their folders below the user directory."""

    def __init__(self, root: Callable[[], str], multi_user: bool = False) -> None:
        """`root` is asked each time, because main may move the directory after this is built."""
        self._root = root
        self.multi_user = multi_user
        self._users: dict[str, str] | None = None
        self._lock = threading.Lock()

    @property
    def root(self) -> Path:
        """Folder with one sub-folder per user."""
        return Path(self._root())

    @property
    def users(self) -> dict[str, str]:
        """User id -> display name, read once from `users.json`."""
        if not self.multi_user:
            return {DEFAULT_USER: DEFAULT_USER}
        if self._users is None:
            self._users = self._read_users()
        return self._users

    def _read_users(self) -> dict[str, str]:
        path = self.root / "users.json"
        if not path.is_file():
            return {}
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError(f"{path} must hold an object: user id -> name")
        return {str(user): str(name) for user, name in stored.items()}

    def add_user(self, name: str) -> str:
        """Adds a user and returns the new id.

        Raises:
            UserNameRefused: the name is empty, taken, too long or reserved.
        """
        name = name.strip()
        if not name or len(name) > MAX_USER_NAME:
            raise UserNameRefused(f"a user name has 1 to {MAX_USER_NAME} characters")
        if name.startswith(SYSTEM_USER_PREFIX):
            raise UserNameRefused("names that begin with two underscores are reserved")
        with self._lock:
            users = self.users
            if name in users.values():
                raise UserNameRefused(f"the user name {name!r} is taken; choose another")
            user_id = f"{re.sub(r'[^a-zA-Z0-9_-]+', '-', name)}_{uuid.uuid4()}"
            users[user_id] = name
            write_atomically(self.root / "users.json", json.dumps(users).encode())
        self.furnish(user_id)
        return user_id

    def furnish(self, user_id: str) -> None:
        """Makes the folders in which the editor looks; it reports each missing one as an error."""
        for name in EDITOR_FOLDERS:
            (self.folder_of(user_id) / name).mkdir(parents=True, exist_ok=True)

    def get_request_user_id(self, request: web.Request) -> str:
        """The id of the user who asks.

        Raises:
            UnknownUserError: in multi-user mode, the header names no known user.
        """
        authenticated = request.get(USER)
        if authenticated is not None:
            return str(authenticated)
        if not self.multi_user:
            return DEFAULT_USER
        claimed = request.headers.get("comfy-user", "")
        if claimed not in self.users or claimed.startswith(SYSTEM_USER_PREFIX):
            raise UnknownUserError(f"unknown user {claimed!r}; choose one of GET /users")
        return claimed

    def folder_of(self, user_id: str) -> Path:
        """The folder of a user; it need not exist."""
        if user_id.startswith(SYSTEM_USER_PREFIX):
            raise UnknownUserError(f"the user {user_id!r} is reserved")
        return resolve_below(self.root, user_id)

    def request_folder(self, request: web.Request) -> Path:
        """The folder of the user who asks."""
        return self.folder_of(self.get_request_user_id(request))

    def get_request_user_filepath(
        self,
        request: web.Request,
        file: str | None,
        type: str = "userdata",
        create_dir: bool = True,
    ) -> str | None:
        """Path of a user's file, or of the folder when `file` is None; None if it leads outside.

        Raises:
            KeyError: `type` is not `userdata`.
        """
        if type != "userdata":
            raise KeyError(f"unknown kind of user file {type!r}; known: userdata")
        try:
            folder = self.request_folder(request)
            path = folder if file is None else resolve_below(folder, file)
        except PathRefused:
            return None
        if create_dir:
            (path if file is None else path.parent).mkdir(parents=True, exist_ok=True)
        return str(path)

    def read_settings(self, user_id: str) -> dict[str, Any]:
        """The stored settings; empty when there are none or the file is unreadable."""
        path = self.folder_of(user_id) / SETTINGS_FILE
        if not path.is_file():
            return {}
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            logger.warning("the settings in %s cannot be read: %s", path, error)
            return {}
        if not isinstance(stored, dict):
            return {}
        stored.pop(PROTOTYPE, None)
        return stored

    def merge_settings(self, user_id: str, changes: dict[str, Any]) -> None:
        """Stores changed settings over the old ones; concurrent changes do not lose each other."""
        with self._lock:
            merged = {**self.read_settings(user_id), **changes}
            path = self.folder_of(user_id) / SETTINGS_FILE
            write_atomically(path, json.dumps(merged, indent=4, allow_nan=False).encode())
