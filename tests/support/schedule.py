"""Which tests share a process when there are several, and in which order they are handed out.

A file stays in one process, for its fixtures. The black-box tests are parted by the policy of their
server instead, so that each server is started once. What takes long is handed out first: the
processes then end at about the same time.
"""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

LONG = (
    "tests/browser/test_",
    "tests/blackbox/test_crash.py",
    "tests/blackbox/test_workers.py",
    "blackbox servers: ",
    "tests/comfy_extras/test_training.py",
    "tests/comfy/test_batch_split.py",
    "tests/integration/",
    "tests/demo/",
    "tests/comfy_server/",
    "tests/comfy/",
)
"""Beginnings of the names of groups that take more than a few seconds, the longest first."""

_POLICY = re.compile(r"tests/blackbox/.*[\[-](classic|lru|none|ram)[\]-]")


def group(test_id: str) -> str:
    """The group of tests that this one runs with, in one process."""
    policy = _POLICY.match(test_id)
    if policy is not None:
        return f"blackbox servers: {policy[1]}"
    return test_id.partition("::")[0]


def place(test_id: str) -> int:
    """When a test's group is handed out: smaller numbers come first."""
    name = group(test_id)
    return next((at for at, start in enumerate(LONG) if name.startswith(start)), len(LONG))


class LongestFirst(LoadScopeScheduling):
    """Hands out whole groups in the order in which the tests were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
