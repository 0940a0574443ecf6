"""The one gate every request passes: which Host names we answer to, which pages may ask.

A browser sends requests for any page, so a page from elsewhere could use a server that only its
owner can reach. Three facts give such a request away: an `Origin` that is not this server, a
`Sec-Fetch-Site` of `cross-site`, and a `Host` that is not a name of this machine (DNS rebinding).
Programs send none of these and pass.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

# Headers only a proxy adds: a page of another site cannot send them without being asked first.
_FORWARDED = ("X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Forwarded", "Via")


USUAL_NAMES = ("127.0.0.1", "localhost", "::1")  # not worth taking apart at every request


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    name = host.strip("[]").rstrip(".").lower()
    if name in USUAL_NAMES or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def split_host(value: str) -> tuple[str, int | None]:
    """Host name (lower case, without brackets) and port of a Host header or netloc."""
    try:
        parts = urlsplit(f"//{value}")
        return (parts.hostname or "").lower(), parts.port
    except ValueError:
        return "", None


def _is_nobodys(host: str) -> bool:
    """Whether no page of a stranger can have this name: an address, or a local one."""
    if "." not in host.rstrip("."):
        return True  # also an IPv6 address
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Gate:
    """Decides about one request from its headers alone.

    Attributes:
        loopback_only: The server listens on loopback addresses only, so its names are known.
        allowed_hosts: Further names it answers to. A server that listens on other addresses too
            knows its names only if some are given; addresses and names without a dot, which no
            foreign page can have, then stay open.
        cors_origin: Origin that is let in beside our own; `*` lets everyone in.
    """

    loopback_only: bool = True
    allowed_hosts: Collection[str] = ()
    cors_origin: str | None = None

    def refusal(self, headers: Mapping[str, str], method: str, path: str) -> str | None:
        """Why the request is refused, with the mend; None lets it pass."""
        if self.cors_origin == "*":
            return None
        host, port = split_host(headers.get("Host", ""))
        if not host and headers.get("Host"):
            return "the Host header is malformed"
        if self._is_foreign_host(host):
            where = "listens on this machine only and " if self.loopback_only else ""
            return (
                f"this server {where}is not called {host!r}; use "
                f"{'http://127.0.0.1' if self.loopback_only else 'its address'}, or start it with "
                f"--allow-host {host}"
            )
        return self._refuse_origin(headers, host, port) or self._refuse_cross_site(
            headers, host, method, path
        )

    def _is_foreign_host(self, host: str) -> bool:
        if not host or is_loopback(host) or host in self.allowed_hosts:
            return False
        return self.loopback_only or (bool(self.allowed_hosts) and not _is_nobodys(host))

    def _refuse_origin(self, headers: Mapping[str, str], host: str, port: int | None) -> str | None:
        origin = headers.get("Origin")
        if origin is None or not host or origin == self.cors_origin:
            return None
        parts = urlsplit(origin)
        origin_host, origin_port = split_host(parts.netloc)
        same_port = port is None or origin_port is None or port == origin_port
        if origin_host == host and same_port:
            return None
        if origin_host in self.allowed_hosts and origin_host:
            return None
        if not is_loopback(host) and any(name in headers for name in _FORWARDED):
            return None  # a proxy may rename the host; it answers for what it lets through
        if origin == "null":
            return (
                "a local file or a sandboxed frame may not use this server; open the editor itself"
            )
        return (
            f"a page of {origin} may not use this server ({host}); open the editor under one "
            f"name, or start the server with --enable-cors-header {origin}"
        )

    def _refuse_cross_site(
        self, headers: Mapping[str, str], host: str, method: str, path: str
    ) -> str | None:
        if headers.get("Sec-Fetch-Site", "").lower() != "cross-site" or not is_loopback(host):
            return None
        if self.cors_origin is not None and headers.get("Origin") == self.cors_origin:
            return None
        followed_link = (
            method == "GET"
            and path == "/"
            and headers.get("Sec-Fetch-Mode") == "navigate"
            and headers.get("Sec-Fetch-Dest") == "document"
        )
        return None if followed_link else "a page of another site may not use this server"
