"""Users who may log in: names, roles, hashed tokens and sessions, in one private file.

Tokens and session keys are 256 random bits, so a plain SHA-256 of them cannot be searched; what is
stored lets nobody in. The file is written by `add_account` in another process too, so it is read
again whenever it has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfy_server.user_files import write_atomically

ROLES = ("user", "admin")
SESSION_S = 14 * 24 * 3600.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}(?<!\.)")


class AccountRefused(ValueError):
    """A name or role that is not acceptable."""


@dataclass(frozen=True)
class Account:
    """Who somebody is."""

    name: str
    role: str

    @property
    def is_admin(self) -> bool:
        """Whether this user sees and controls everything."""
        return self.role == "admin"


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


class AccountStore:
    """The file of accounts; every method may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._read_at: tuple[int, int] | None = None
        self._users: dict[str, dict[str, Any]] = {}
        self._sessions: dict[str, dict[str, Any]] = {}

    def _refresh(self) -> None:
        """Reads the file if it is new; raises ValueError if it is damaged."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp == self._read_at:
            return
        stored = json.loads(self._path.read_text(encoding="utf-8"))
        self._users, self._sessions = stored["users"], stored["sessions"]
        self._read_at = stamp

    def _save(self) -> None:
        data = json.dumps({"users": self._users, "sessions": self._sessions}, indent=1)
        write_atomically(self._path, data.encode())  # a temporary file is private from its birth
        status = os.stat(self._path)
        self._read_at = (status.st_mtime_ns, status.st_size)

    def is_empty(self) -> bool:
        """Whether nobody can log in yet."""
        with self._lock:
            self._refresh()
            return not self._users

    def role_of(self, name: str) -> str | None:
        """The role of a user, None for an unknown one."""
        with self._lock:
            self._refresh()
            entry = self._users.get(name)
            return None if entry is None else str(entry["role"])

    def add(self, spec: str) -> tuple[Account, str]:
        """Makes or renews a user; an old token and its sessions end.

        Args:
            spec: `NAME` or `NAME:ROLE`.
        Returns:
            The account and its token, which is stored nowhere.
        Raises:
            AccountRefused: the name or the role is not acceptable.
        """
        name, _, role = spec.partition(":")
        role = role or "user"
        if not _NAME.fullmatch(name):
            raise AccountRefused(
                f"user name {name!r}: use 1 to 64 letters, digits, dots and hyphens"
            )
        if role not in ROLES:
            raise AccountRefused(f"role {role!r} is unknown; known: {', '.join(ROLES)}")
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._refresh()
            self._users[name] = {"role": role, "token": _hash(token), "created": time.time()}
            self._sessions = {
                key: value for key, value in self._sessions.items() if value["user"] != name
            }
            self._save()
        return Account(name, role), token

    def by_token(self, token: str, name: str | None = None) -> Account | None:
        """Whose token this is; with `name`, only if it is that user's."""
        digest = _hash(token)
        with self._lock:
            self._refresh()
            for user, entry in self._users.items():
                if hmac.compare_digest(entry["token"], digest) and name in (None, "", user):
                    return Account(user, entry["role"])
        return None

    def open_session(self, account: Account) -> str:
        """Starts a session; returns its key, which is stored nowhere."""
        key = secrets.token_urlsafe(32)
        now = time.time()
        with self._lock:
            self._refresh()
            self._sessions = {
                old: value for old, value in self._sessions.items() if value["expires"] > now
            }
            self._sessions[_hash(key)] = {"user": account.name, "expires": now + SESSION_S}
            self._save()
        return key

    def by_session(self, key: str) -> Account | None:
        """Whose session this is, unless it has expired."""
        with self._lock:
            self._refresh()
            session = self._sessions.get(_hash(key))
            if session is None or session["expires"] < time.time():
                return None
            entry = self._users.get(session["user"])
            return None if entry is None else Account(session["user"], entry["role"])

    def close_session(self, key: str) -> None:
        """Ends a session; an unknown one is ignored."""
        with self._lock:
            self._refresh()
            if self._sessions.pop(_hash(key), None) is not None:
                self._save()
