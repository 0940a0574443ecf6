"""The OpenAPI 3.1 document, made from the routes of a running application.

Routes that have a twin under `/api` are listed once, without the prefix; the server list names both
bases. Routes of packs, which describe nothing, are listed with their path and method.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from comfy_server.describe import (
    ATTRIBUTE,
    BINARY,
    EMPTY,
    INTEGER,
    OBJECT,
    PLAIN,
    TEXT,
    TEXTS,
    Operation,
    Schema,
    ref,
    shape,
)

API_PREFIX = "/api/"
NUMBER: Schema = {"type": "number"}

SCHEMAS: dict[str, Schema] = {
    "Error": shape({"error": TEXT}),
    "PromptError": shape(
        {
            "error": shape({"type": TEXT, "message": TEXT, "details": TEXT, "extra_info": OBJECT}),
            "node_errors": OBJECT,
        }
    ),
    "Prompt": {
        "type": "object",
        "description": "Node id -> node.",
        "additionalProperties": shape({"class_type": TEXT}, inputs=OBJECT, _meta=OBJECT),
    },
    "PromptRequest": shape(
        {"prompt": ref("Prompt")},
        client_id=TEXT,
        extra_data=OBJECT,
        prompt_id=TEXT,
        number=NUMBER,
        front={"type": "boolean"},
        partial_execution_targets=TEXTS,
        wait={"type": "boolean"},
    ),
    "PromptAccepted": shape(
        {"prompt_id": TEXT, "number": NUMBER, "node_errors": OBJECT}, history=ref("HistoryEntry")
    ),
    "QueueInfo": shape({"exec_info": shape({"queue_remaining": INTEGER})}),
    "QueueItem": {
        "type": "array",
        "minItems": 5,
        "maxItems": 5,
        "description": "[number, prompt id, prompt, extra data, ids of output nodes]",
    },
    "HistoryEntry": shape({"prompt": {"type": "array"}, "outputs": OBJECT}, meta=OBJECT),
    "Job": shape(
        {
            "id": TEXT,
            "create_time": NUMBER,
            "priority": NUMBER,
            "outputs_count": INTEGER,
            "status": {"enum": ["pending", "in_progress", "completed", "failed", "cancelled"]},
        },
        preview_output=OBJECT,
        workflow_id=TEXT,
        execution_error=OBJECT,
    ),
    "Cancelled": shape({"cancelled": {"type": "boolean"}}),
    "Stored": shape({"name": TEXT, "subfolder": TEXT, "type": TEXT}),
    "FileInfo": shape({"path": TEXT, "size": INTEGER, "modified": NUMBER, "created": NUMBER}),
}
_COMMON: dict[int, Schema | str] = {
    401: ref("Error"),
    403: PLAIN,
    413: PLAIN,
    429: ref("Error"),
}
_PARAMETER = re.compile(r"\{(\w+)(?::[^{}]*)?\}")


def _content(kind: Schema | str) -> dict[str, Any] | None:
    if kind == EMPTY:
        return None
    if kind == BINARY:
        return {"*/*": {"schema": {}}}
    if kind == PLAIN:
        return {"text/plain": {"schema": TEXT}, "application/json": {"schema": ref("Error")}}
    return {"application/json": {"schema": kind}}


def _answer(status: int, kind: Schema | str) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": web.Response(status=status).reason or str(status)}
    content = _content(kind)
    if content is not None:
        answer["content"] = content
    return answer


def _parameters(path: str, operation: Operation) -> list[dict[str, Any]]:
    found = [
        {"name": name, "in": "path", "required": True, "schema": operation.path.get(name, TEXT)}
        for name in _PARAMETER.findall(path)
    ]
    for name, schema in operation.query.items():
        found.append(
            {
                "name": name.rstrip("!"),
                "in": "query",
                "required": name.endswith("!"),
                "schema": schema,
            }
        )
    return found


def _body(operation: Operation) -> dict[str, Any] | None:
    kind = operation.body
    if kind is None:
        return None
    if kind == BINARY:
        content: dict[str, Any] = {"application/octet-stream": {"schema": {}}}
    elif isinstance(kind, dict) and "multipart" in kind:
        content = {"multipart/form-data": {"schema": kind["multipart"]}}
    else:
        content = {"application/json": {"schema": kind}}
    return {"required": operation.body_required, "content": content}


def _summary(handler: Any) -> str:
    text = inspect.getdoc(handler) or ""
    return text.partition("\n")[0]


def _operation(path: str, handler: Any) -> dict[str, Any]:
    described = getattr(handler, ATTRIBUTE, None)
    known: Operation = described or Operation(answers={200: BINARY})
    listed: dict[str, Any] = {"summary": _summary(handler)}
    parameters = _parameters(path, known)
    if parameters:
        listed["parameters"] = parameters
    body = _body(known)
    if body is not None:
        listed["requestBody"] = body
    answers = dict(sorted({**_COMMON, **known.answers}.items()))
    listed["responses"] = {str(status): _answer(status, kind) for status, kind in answers.items()}
    if described is None:
        listed["tags"] = ["packs"]
    return listed


def _documented(app: web.Application) -> Iterator[tuple[str, str, Any]]:
    """(method, path as registered, handler) of every route to be listed."""
    routes = [
        (route.method, str(getattr(route.resource, "_orig_path", route.resource.canonical)), route)
        for route in app.router.routes()
        if route.resource is not None and not isinstance(route.resource, web.StaticResource)
    ]
    paths = {(method, path) for method, path, _ in routes}
    for method, path, route in routes:
        is_twin = path.startswith(API_PREFIX) and (method, path[len(API_PREFIX) - 1 :]) in paths
        described = getattr(route.handler, ATTRIBUTE, None)
        if method not in ("HEAD", "*") and not is_twin and not (described and described.hidden):
            yield method, path, route.handler


def document(app: web.Application, version: str) -> dict[str, Any]:
    """The document of an application whose routes are added."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in _documented(app):
        shown = _PARAMETER.sub(r"{\1}", path)
        paths.setdefault(shown, {})[method.lower()] = _operation(path, handler)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "latentloom",
            "version": version,
            "description": "Queue prompts, follow them on the socket `/ws`, fetch the results.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}, {"url": "/api", "description": "For all paths not below it."}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }
