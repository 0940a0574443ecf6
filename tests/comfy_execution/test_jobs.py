"""Job records: status, preview, paging."""

from __future__ import annotations

from typing import Any

import pytest

from comfy_execution.jobs import (
    JobQuery,
    job_from_history,
    job_from_item,
    list_jobs,
    queued_job_details,
    summarize_outputs,
)


def entry(messages: list[Any], status: str = "success", outputs: Any = None) -> dict[str, Any]:
    item = [3, "id", {}, {"create_time": 10, "extra_pnginfo": {"workflow": {"id": "wf"}}}, []]
    return {
        "prompt": item,
        "outputs": outputs or {},
        "status": {"status_str": status, "completed": status == "success", "messages": messages},
    }


START = ["execution_start", {"timestamp": 100}]


@pytest.mark.parametrize(
    ("last", "status", "expected"),
    [
        (["execution_success", {"timestamp": 250}], "success", "completed"),
        (["execution_error", {"timestamp": 250, "node_id": "1"}], "error", "failed"),
        (["execution_interrupted", {"timestamp": 250}], "error", "cancelled"),
    ],
)
def test_finished_jobs(last: list[Any], status: str, expected: str) -> None:
    job = job_from_history("id", entry([START, last], status))
    assert job["status"] == expected
    assert (job["execution_start_time"], job["execution_end_time"]) == (100, 250)
    assert (job["priority"], job["create_time"], job["workflow_id"]) == (3, 10, "wf")
    assert ("execution_error" in job) == (expected == "failed")


def test_queued_jobs_always_have_a_numeric_create_time() -> None:
    item = (1, "id", {"1": {}}, {}, [])
    assert job_from_item(item, "pending") == {
        "id": "id", "status": "pending", "priority": 1, "create_time": 0, "outputs_count": 0,
    }  # fmt: skip
    assert queued_job_details(item, "in_progress")["workflow"]["prompt"] == {"1": {}}


def picture(name: str, kind: str = "output") -> dict[str, str]:
    return {"filename": name, "subfolder": "", "type": kind}


def test_saved_files_are_preferred_and_text_comes_last() -> None:
    outputs = {
        "1": {"text": ["words"], "images": [picture("t.png", "temp")]},
        "2": {"images": [picture("o.png")], "animated": [True]},
    }
    summary = summarize_outputs(outputs)
    assert (summary.count, summary.previewable) == (2, 3)
    assert summary.preview == picture("o.png") | {"nodeId": "2", "mediaType": "images"}
    assert summarize_outputs({"1": {"text": ["words"]}}).preview == {
        "content": "words", "nodeId": "1", "mediaType": "text",
    }  # fmt: skip


def test_formats_suffixes_and_odd_items() -> None:
    outputs = {
        "1": {"gifs": [{"filename": "a.mp4", "format": "video/h264-mp4"}]},
        "2": {"result": ["mesh.glb", None]},
        "3": {"files": [{"filename": "mesh.GLB"}], "odd": "no list", "x": [{"filename": 5}]},
        "4": {"images": [picture("p.png", "cloud")]},
    }
    summary = summarize_outputs(outputs)
    assert summary.previewable == 3
    assert summary.preview is not None
    assert "type" not in (summarize_outputs({"4": outputs["4"]}).preview or {})


def jobs() -> list[dict[str, Any]]:
    return [
        {
            "id": str(i), "status": "completed" if i % 2 else "failed", "create_time": i,
            "execution_start_time": 0, "execution_end_time": 10 - i, "workflow_id": f"w{i % 3}",
        }
        for i in range(6)
    ]  # fmt: skip


def test_listing() -> None:
    answer = list_jobs(jobs(), JobQuery(statuses=("completed",), limit=2))
    assert [job["id"] for job in answer["jobs"]] == ["5", "3"]
    assert answer["pagination"] == {"offset": 0, "limit": 2, "total": 3, "has_more": True}
    answer = list_jobs(jobs(), JobQuery(sort_by="execution_duration", sort_order="asc", offset=-4))
    assert [job["id"] for job in answer["jobs"]] == ["5", "4", "3", "2", "1", "0"]
    answer = list_jobs(jobs(), JobQuery(workflow_id="w1", offset=1))
    assert [job["id"] for job in answer["jobs"]] == ["1"]


@pytest.mark.parametrize(
    "wrong",
    [{"statuses": ("odd",)}, {"sort_by": "x"}, {"sort_order": "x"}, {"limit": 0}],
)
def test_bad_queries(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"odd|x|0"):
        JobQuery(**wrong)
