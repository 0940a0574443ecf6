"""Model files: `/models`, `/experiment/models`, `/view_metadata`, `/embeddings`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from aiohttp import web

import folder_paths
from comfy_server.describe import BINARY, EMPTY, OBJECT, OBJECTS, PLAIN, TEXT, TEXTS, describe
from comfy_server.images import decode
from comfy_server.model_files import list_files, preview_webp, safetensors_metadata
from comfy_server.strict_json import json_response

routes = web.RouteTableDef()

NOT_MODELS = ("configs", "custom_nodes")


def _known(request: web.Request) -> str:
    folder = request.match_info["folder"]
    if folder not in folder_paths.folder_names_and_paths:
        raise web.HTTPNotFound(text=f"no model folder {folder!r}")
    return folder


@routes.get("/models")
@describe(TEXTS)
async def get_folders(_: web.Request) -> web.Response:
    """The names of the model folders."""
    return json_response(list(folder_paths.folder_names_and_paths))


@routes.get("/models/{folder}")
@describe(TEXTS, answers={404: PLAIN})
async def get_files(request: web.Request) -> web.Response:
    """The files of a model folder, sorted."""
    return json_response(await asyncio.to_thread(folder_paths.get_filename_list, _known(request)))


@routes.get("/experiment/models")
@describe(OBJECTS)
async def get_model_folders(_: web.Request) -> web.Response:
    """The model folders with their directories and file suffixes."""
    rows = folder_paths.folder_names_and_paths.items()
    return json_response(
        [
            {"name": name, "folders": list(row[0]), "extensions": sorted(row[1])}
            for name, row in rows
            if name not in NOT_MODELS
        ]
    )


@routes.get("/experiment/models/{folder}")
@describe(OBJECTS, answers={404: PLAIN})
async def get_model_files(request: web.Request) -> web.Response:
    """The files of a model folder with size and times."""
    return json_response(await asyncio.to_thread(list_files, _known(request)))


@routes.get(r"/experiment/models/preview/{folder}/{path_index:\d+}/{filename:.*}")
@describe(
    BINARY,
    path={"path_index": {"type": "integer", "minimum": 0}},
    answers={400: PLAIN, 404: PLAIN},
)
async def get_preview(request: web.Request) -> web.Response:
    """A picture that belongs to a model, as webp."""
    directories = folder_paths.get_folder_paths(_known(request))
    index = int(request.match_info["path_index"][:9])
    if index >= len(directories):
        raise web.HTTPNotFound(text=f"the folder has {len(directories)} directories")
    filename = request.match_info["filename"]
    body = await decode(request, preview_webp, directories[index], filename)
    if body is None:
        raise web.HTTPNotFound(text="no preview")
    headers = {"Cache-Control": "public, max-age=86400"}
    return web.Response(body=body, content_type="image/webp", headers=headers)


@routes.get("/view_metadata/{folder}")
@describe(OBJECT, query={"filename!": TEXT}, answers={404: EMPTY})
async def get_metadata(request: web.Request) -> web.Response:
    """The metadata in the header of a safetensors file.

    404 has no body: the editor asks for every model it lists and parses what it gets.
    """
    folder, filename = request.match_info["folder"], request.query.get("filename", "")
    is_known = folder in folder_paths.folder_names_and_paths
    path = folder_paths.get_full_path(folder, filename) if is_known else None
    suffix = os.path.splitext(filename)[1].lower()
    if path is None or suffix not in (".safetensors", ".sft"):
        return web.Response(status=404)
    metadata = await asyncio.to_thread(safetensors_metadata, Path(path))
    return web.Response(status=404) if metadata is None else json_response(metadata)


@routes.get("/embeddings")
@describe(TEXTS)
async def get_embeddings(_: web.Request) -> web.Response:
    """Names of the embeddings, without suffix."""
    names = await asyncio.to_thread(folder_paths.get_filename_list, "embeddings")
    return json_response([os.path.splitext(name)[0] for name in names])
