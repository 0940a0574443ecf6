"""What the server is told at start, resolved: frozen, built by main from the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

DEFAULT_MAX_UPLOAD_BYTES = 100 * 1024 * 1024
DEFAULT_MAX_PROMPT_NODES = 50_000


@dataclass(frozen=True)
class ServerOptions:
    """Network, security and presentation policy of the HTTP side.

    Attributes:
        listen: Addresses to bind, IPv4 or IPv6, each on `port`.
        cors_origin: Origin that other sites' pages may come from (`*` for any); None keeps the
            same-origin gate.
        allowed_hosts: Host names, beside loopback ones, that a loopback-only server answers to.
        max_upload_bytes: Largest request body.
        max_prompt_nodes: Nodes that a prompt may have; 0 bounds nobody.
        confine_page: Send a Content-Security-Policy that keeps the page from other hosts.
        frontend_root: Static folder of the editor; None serves no page.
        extension_root: Our own browser extension, served as `/extensions/latentloom`.
        static_packages: Python packages (import name -> sub-folder) with the help pages.
        feature_flags: Added to the server features; core keys win.
        preview_interval_s: Shortest time between two previews sent to one socket; encoding one
            takes a core 2 ms.
        user_quota_bytes: With authentication, what the files of a user may take; 0 bounds nobody.
    """

    listen: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8188
    tls_keyfile: Path | None = None
    tls_certfile: Path | None = None
    cors_origin: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES
    max_prompt_nodes: int = DEFAULT_MAX_PROMPT_NODES
    compress: bool = False
    confine_page: bool = False
    multi_user: bool = False
    auth: bool = False
    frontend_root: Path | None = None
    extension_root: Path | None = None
    hashing_function: str = "sha256"
    preview_size: int = 512
    preview_interval_s: float = 0.1
    requests_per_minute: int = 0
    user_quota_bytes: int = 0
    feature_flags: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    argv: tuple[str, ...] = ()
    version: str = "0.1.0"
    print_addresses: bool = True

    @property
    def tls(self) -> bool:
        """TLS is on only when key and certificate are both given."""
        return self.tls_keyfile is not None and self.tls_certfile is not None
