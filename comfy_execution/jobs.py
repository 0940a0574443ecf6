"""Job records of ``/api/jobs``: pure functions over queue items and history entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Job = dict[str, Any]

STATUSES = ("pending", "in_progress", "completed", "failed", "cancelled")
SORT_KEYS = ("created_at", "execution_duration")
SORT_ORDERS = ("asc", "desc")

_MEDIA_KEYS = {"images", "video", "audio", "3d"}
_TEXT_PREVIEW_CHARACTERS = 1024
_SUFFIXES_3D = (".obj", ".fbx", ".gltf", ".glb", ".stl", ".ply", ".spz", ".splat", ".ksplat")
_FILE_TYPES = ("output", "input", "temp")


def job_from_item(item: Sequence[Any], status: str) -> Job:
    """Record of a pending or running prompt.

    Args:
        item: Queue item; see comfy_execution.items.
        status: "pending" or "in_progress".
    """
    return _base_record(item, item[1], status) | {"outputs_count": 0}


def job_from_history(prompt_id: str, entry: dict[str, Any]) -> Job:
    """Record of a finished prompt, without its outputs and its workflow."""
    status = entry.get("status") or {}
    messages = status.get("messages") or []
    job = _base_record(entry["prompt"], prompt_id, finished_status(status))
    times = [data["timestamp"] for _, data in messages if data.get("timestamp") is not None]
    if times:
        job["execution_start_time"] = times[0]
        job["execution_end_time"] = times[-1]
    if job["status"] == "failed":
        errors = [data for name, data in messages if name == "execution_error"]
        if errors:
            job["execution_error"] = errors[-1]
    summary = summarize_outputs(entry.get("outputs") or {})
    job["outputs_count"] = summary.count
    job["previewable_outputs_count"] = summary.previewable
    if summary.preview is not None:
        job["preview_output"] = summary.preview
    return job


def job_details(prompt_id: str, entry: dict[str, Any]) -> Job:
    """Full record of a finished prompt: with outputs, status, workflow and per-node figures."""
    job = job_from_history(prompt_id, entry)
    job["outputs"] = entry.get("outputs") or {}
    job["execution_status"] = entry.get("status")
    job["workflow"] = {"prompt": entry["prompt"][2], "extra_data": entry["prompt"][3]}
    for name in ("nodes", "environment"):
        if entry.get(name):
            job[name] = entry[name]
    return job


def queued_job_details(item: Sequence[Any], status: str) -> Job:
    """Full record of a pending or running prompt."""
    workflow = {"prompt": item[2], "extra_data": item[3]}
    return job_from_item(item, status) | {"workflow": workflow}


def finished_status(status: dict[str, Any]) -> str:
    """completed, cancelled (stopped by somebody) or failed."""
    if status.get("status_str") == "success":
        return "completed"
    messages = status.get("messages") or []
    stopped = bool(messages) and messages[-1][0] == "execution_interrupted"
    return "cancelled" if stopped else "failed"


@dataclass(frozen=True, slots=True)
class JobQuery:
    """What a client asks of the job list.

    Raises:
        ValueError: with a text for the client, when a field is not acceptable.
    """

    statuses: tuple[str, ...] = STATUSES
    workflow_id: str | None = None
    sort_by: str = "created_at"
    sort_order: str = "desc"
    limit: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        unknown = [status for status in self.statuses if status not in STATUSES]
        if unknown:
            raise ValueError(f"unknown status {', '.join(unknown)}; known: {', '.join(STATUSES)}")
        if self.sort_by not in SORT_KEYS:
            raise ValueError(f"unknown sort_by {self.sort_by}; known: {', '.join(SORT_KEYS)}")
        if self.sort_order not in SORT_ORDERS:
            raise ValueError(
                f"unknown sort_order {self.sort_order}; known: {', '.join(SORT_ORDERS)}"
            )
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"limit must be a positive integer, got {self.limit}")


def list_jobs(jobs: Iterable[Job], query: JobQuery) -> dict[str, Any]:
    """The answer to ``GET /api/jobs``: one page of the matching jobs."""
    found = [
        job
        for job in jobs
        if job["status"] in query.statuses
        and (query.workflow_id is None or job.get("workflow_id") == query.workflow_id)
    ]
    key = _created_at if query.sort_by == "created_at" else _duration
    found.sort(key=key, reverse=query.sort_order == "desc")
    offset = max(0, query.offset)
    end = len(found) if query.limit is None else offset + query.limit
    return {
        "jobs": found[offset:end],
        "pagination": {
            "offset": offset,
            "limit": query.limit,
            "total": len(found),
            "has_more": end < len(found),
        },
    }


@dataclass(frozen=True, slots=True)
class OutputSummary:
    """How much a prompt produced, and the item that stands for it in a list."""

    count: int
    previewable: int
    preview: dict[str, Any] | None


def summarize_outputs(outputs: dict[str, Any]) -> OutputSummary:
    """Counts output items and picks the preview.

    A saved file is preferred to a temporary one, and anything visible to text.
    """
    count = previewable = 0
    saved: dict[str, Any] | None = None
    other: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    for node_id, output in outputs.items():
        for kind, items in output.items():
            if kind == "animated" or not isinstance(items, list):
                continue
            for item in items:
                count += isinstance(item, dict)
                preview = _preview_record(node_id, kind, item)
                if preview is None:
                    continue
                previewable += 1
                if preview["mediaType"] == "text":
                    text = text or preview
                elif preview.get("type") == "output":
                    saved = saved or preview
                else:
                    other = other or preview
    return OutputSummary(count, previewable, saved or other or text)


def _preview_record(node_id: str, kind: str, item: Any) -> dict[str, Any] | None:
    if kind == "text":
        if not isinstance(item, str):
            return None
        text = item[:_TEXT_PREVIEW_CHARACTERS]
        cut = {"truncated": True} if len(text) < len(item) else {}
        return {"content": text, **cut, "nodeId": node_id, "mediaType": "text"}
    if not isinstance(item, dict) or not _is_previewable(kind, item):
        return None
    record = {key: value for key, value in item.items() if value is not None}
    if record.get("type", "output") not in _FILE_TYPES:
        del record["type"]  # the frontend refuses the whole list over an unknown one
    return record | {"nodeId": node_id, "mediaType": kind}


def _is_previewable(kind: str, item: dict[str, Any]) -> bool:
    if kind in _MEDIA_KEYS:
        return True
    media_type = item.get("format")
    if isinstance(media_type, str) and media_type.startswith(("video/", "audio/")):
        return True
    filename = item.get("filename")
    return isinstance(filename, str) and filename.lower().endswith(_SUFFIXES_3D)


def _base_record(item: Sequence[Any], prompt_id: str, status: str) -> Job:
    number, extra_data = item[0], item[3]
    create_time = extra_data.get("create_time")
    job: Job = {
        "id": prompt_id,
        "status": status,
        "priority": number,
        "create_time": create_time if isinstance(create_time, (int, float)) else 0,
    }
    if extra_data.get("user_id"):
        job["user_id"] = extra_data["user_id"]
    pnginfo = extra_data.get("extra_pnginfo")
    workflow = pnginfo.get("workflow") if isinstance(pnginfo, dict) else None
    workflow_id = workflow.get("id") if isinstance(workflow, dict) else None
    if workflow_id is not None:
        job["workflow_id"] = str(workflow_id)
    return job


def _created_at(job: Job) -> float:
    return float(job["create_time"])


def _duration(job: Job) -> float:
    start, end = job.get("execution_start_time"), job.get("execution_end_time")
    return float(end - start) if start is not None and end is not None else 0.0
