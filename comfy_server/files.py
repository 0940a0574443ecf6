"""How a file is sent: the one policy for everything a stranger may have written.

Only types that a browser shows without running them go out inline. Anything else is a download of
type `application/octet-stream`. All answers forbid sniffing and carry a sandboxing policy, so that
even a picture format that can hold script (SVG) stays inert when opened on its own.
"""

from __future__ import annotations

import mimetypes
import os
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

SANDBOX = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src 'self'; sandbox"

INLINE_TYPES = frozenset(
    {
        "image/png",
        "image/jpeg",
        "image/webp",
        "image/gif",
        "image/avif",
        "image/bmp",
        "image/tiff",
        "image/x-icon",
        "image/vnd.microsoft.icon",
        "video/mp4",
        "video/webm",
        "video/quicktime",
        "video/ogg",
        "video/x-matroska",
        "audio/mpeg",
        "audio/ogg",
        "audio/flac",
        "audio/x-flac",
        "audio/wav",
        "audio/x-wav",
        "audio/opus",
        "audio/mp4",
        "audio/aac",
        "audio/webm",
        "audio/vnd.wave",
        "application/json",
        "text/plain",
        "model/gltf-binary",
        "model/gltf+json",
        "model/obj",
        "model/stl",
    }
)
IMAGE_ONLY_TYPES = frozenset({"image/svg+xml"})

# suffixes whose type the system's own table may lack or name differently
_TYPES = {
    ".webp": "image/webp",
    ".avif": "image/avif",
    ".js": "application/javascript",
    ".mjs": "application/javascript",
    ".md": "application/octet-stream",
    ".css": "text/css",
    ".json": "application/json",
    ".wasm": "application/wasm",
    ".svg": "image/svg+xml",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
    ".flac": "audio/flac",
    ".opus": "audio/opus",
    ".glb": "model/gltf-binary",
    ".gltf": "model/gltf+json",
    ".woff2": "font/woff2",
    ".ico": "image/x-icon",
    ".mov": "video/quicktime",
    ".m4a": "audio/mp4",
    ".mp3": "audio/mpeg",
    ".wav": "audio/wav",
    ".ogg": "audio/ogg",
    ".mkv": "video/x-matroska",
    ".txt": "text/plain",
}


def content_type(path: Path | str) -> str:
    """Type by suffix, `application/octet-stream` when unknown or compressed."""
    suffix = Path(path).suffix.lower()
    if suffix in _TYPES:
        return _TYPES[suffix]
    guessed, encoding = mimetypes.guess_type(str(path))
    return guessed if guessed and encoding is None else "application/octet-stream"


def disposition(name: str, attachment: bool = False) -> str:
    """A Content-Disposition value; quotes are escaped, other alphabets in RFC 5987 form."""
    plain = "".join(c if " " <= c <= "~" else "_" for c in name)
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    value = f'filename="{escaped}"'
    if plain != name:
        value += f"; filename*=UTF-8''{quote(name, safe='')}"
    return f"attachment; {value}" if attachment else value


def safe_headers(name: str, kind: str, request: web.Request) -> dict[str, str]:
    """Headers for content of `kind` that a stranger may have written."""
    fetch_destination = request.headers.get("Sec-Fetch-Dest", "")
    shown_as_image = kind in IMAGE_ONLY_TYPES and fetch_destination == "image"
    inline = kind in INLINE_TYPES or shown_as_image
    return {
        "Content-Type": kind if inline else "application/octet-stream",
        "Content-Disposition": disposition(name, attachment=not inline),
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": SANDBOX,
        "Cross-Origin-Resource-Policy": "same-origin",
    }


class _StoredFile(web.FileResponse):
    """A file as it is: a neighbour `<name>.gz`, stored by whomever, is not its compressed form."""

    def _get_file_path_stat_encoding(
        self, _: str
    ) -> tuple[Path | None, os.stat_result, str | None]:
        # the library looks for such neighbours and has no switch for it
        return super()._get_file_path_stat_encoding("")


def stranger_file(path: Path, request: web.Request, name: str | None = None) -> web.FileResponse:
    """A file from input, output, temp or user data, with ranges and ETag."""
    shown_name = path.name if name is None else name
    headers = safe_headers(shown_name, content_type(shown_name), request)
    return _StoredFile(path, headers=headers)


def trusted_file(path: Path, headers: dict[str, str] | None = None) -> web.FileResponse:
    """A file that was installed with the program or by its owner (editor, extensions, help)."""
    sent = {"Content-Type": content_type(path), "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(path, headers={**sent, **(headers or {})})


def absent_file(path: Path | str) -> web.Response:
    """404 without a body.

    A missing style sheet keeps its type: the editor's page links optional ones, and browsers report
    an error for each answer that is not `text/css`, whatever its status.
    """
    kind = content_type(path)
    return web.Response(status=404, content_type=kind if kind == "text/css" else None)
