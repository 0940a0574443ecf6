"""The jobs API, the editor's source for queue and history: `/api/jobs`."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from comfy_execution import jobs
from comfy_server.describe import INTEGER, TEXT, TEXTS, describe, ref, shape
from comfy_server.ownership import controls, finished_entry, finished_jobs, visible_queue
from comfy_server.routes.history import LARGE_BYTES, query_integer
from comfy_server.routes.prompt import ID_PATTERN
from comfy_server.routes.queue import FEW
from comfy_server.services import SERVICES
from comfy_server.strict_json import BadJson, error_response, json_response, read_object

routes = web.RouteTableDef()

QUEUED = ("pending", "in_progress")
FINISHED = ("completed", "failed", "cancelled")


def _query(request: web.Request) -> jobs.JobQuery:
    statuses = request.query.get("status")
    wanted = [text.strip() for text in statuses.split(",")] if statuses else []
    return jobs.JobQuery(
        statuses=tuple(text for text in wanted if text) or jobs.STATUSES,
        workflow_id=request.query.get("workflow_id"),
        sort_by=request.query.get("sort_by", "created_at"),
        sort_order=request.query.get("sort_order", "desc"),
        limit=query_integer(request, "limit"),
        offset=query_integer(request, "offset") or 0,
    )


def _records(request: web.Request, statuses: tuple[str, ...]) -> list[dict[str, Any]]:
    """Records of the asker's jobs that can have one of the wanted statuses."""
    queue = request.app[SERVICES].queue
    found: list[dict[str, Any]] = []
    if any(status in QUEUED for status in statuses):
        running, pending = visible_queue(request, queue)
        found += [jobs.job_from_item(item, "pending") for item in pending]
        found += [jobs.job_from_item(item, "in_progress") for item in running]
    if any(status in FINISHED for status in statuses):
        found += finished_jobs(request, queue)
    return found


def _is_id(value: object) -> bool:
    return isinstance(value, str) and ID_PATTERN.fullmatch(value) is not None


@routes.get("/api/jobs")
@describe(
    shape({"jobs": {"type": "array", "items": ref("Job")}, "pagination": {"type": "object"}}),
    query={
        "status": TEXT,
        "workflow_id": TEXT,
        "sort_by": {"enum": list(jobs.SORT_KEYS)},
        "sort_order": {"enum": list(jobs.SORT_ORDERS)},
        "limit": {"type": "integer", "minimum": 1},
        "offset": INTEGER,
    },
    answers={400: ref("Error")},
)
async def get_jobs(request: web.Request) -> web.Response:
    """A page of jobs, waiting, running and finished."""
    try:
        query = _query(request)
    except (ValueError, BadJson) as error:
        return error_response(400, str(error))
    queue = request.app[SERVICES].queue

    def listing() -> web.Response:
        return json_response(jobs.list_jobs(_records(request, query.statuses), query))

    if queue.get_tasks_remaining() + len(queue.history) > FEW:
        return await asyncio.to_thread(listing)
    return listing()


@routes.get("/api/jobs/{job_id}")
@describe(ref("Job"), answers={404: ref("Error")})
async def get_job(request: web.Request) -> web.Response:
    """One job with its outputs and its workflow."""
    queue, job_id = request.app[SERVICES].queue, request.match_info["job_id"]
    running, pending = visible_queue(request, queue)
    for status, items in (("in_progress", running), ("pending", pending)):
        for item in items:
            if item[1] == job_id:
                return json_response(jobs.queued_job_details(item, status))

    def finished() -> web.Response:
        entry = finished_entry(request, queue, job_id).get(job_id)
        if entry is None:
            return error_response(404, "Job not found")
        return json_response(jobs.job_details(job_id, entry))

    if queue.history.size_bytes(job_id) > LARGE_BYTES:
        return await asyncio.to_thread(finished)
    return finished()


@routes.post("/api/jobs/cancel")
@describe(ref("Cancelled"), body=shape({"job_ids": TEXTS}), answers={400: ref("Error")})
async def cancel_jobs(request: web.Request) -> web.Response:
    """Stops or removes several jobs."""
    body = await read_object(request)
    ids = body.get("job_ids")
    if not isinstance(ids, list):
        return error_response(400, "job_ids must be a list of job ids")
    invalid = [value for value in ids if not _is_id(value)]
    if invalid:
        return error_response(400, "some job ids are malformed", invalid_ids=invalid)
    queue = request.app[SERVICES].queue
    running, pending = visible_queue(request, queue)
    open_now = {item[1] for item in (*running, *pending)}
    wanted = [job_id for job_id in dict.fromkeys(ids) if job_id in open_now]
    outcomes = await asyncio.to_thread(lambda: [queue.cancel(job_id) for job_id in wanted])
    return json_response({"cancelled": any(outcome.cancelled for outcome in outcomes)})


@routes.post("/api/jobs/{job_id}/cancel")
@describe(ref("Cancelled"))
async def cancel_job(request: web.Request) -> web.Response:
    """Stops or removes one job; `cancelled` is false when it is neither waiting nor running."""
    queue, job_id = request.app[SERVICES].queue, request.match_info["job_id"]
    if not controls(request, queue, job_id):
        return json_response({"cancelled": False})
    outcome = await asyncio.to_thread(queue.cancel, job_id)
    return json_response({"cancelled": outcome.cancelled})
