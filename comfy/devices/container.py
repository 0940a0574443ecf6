"""What a container may take of the machine: memory, swap and processors, from Linux control groups.

`docker run --memory 8g --cpus 2`, Kubernetes and systemd limit a process without its seeing another
machine: /proc still shows the host's figures, and who believes them is ended by the kernel. The
limit is the lowest on the way from the process's group to the root, in either version of the
interface. Other systems have no such files and no limit.
Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60
"""Figures from here on are how the kernel writes "no limit"."""

RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Parts of what a group has in use that are given up when room is needed."""


@dataclass(frozen=True)
class _Names:
    """Files of one version of the interface."""

    limit: str
    usage: str
    swap_limit: str
    swap_usage: str
    stat_prefix: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.memsw.limit_in_bytes",
             "memory.memsw.usage_in_bytes", "total_")  # fmt: skip
_V2 = _Names("memory.max", "memory.current", "memory.swap.max", "memory.swap.current", "")


class Container:
    """The control groups of this process.

    Args:
        mount: Where the groups are mounted.
        membership: The file that says which groups the process is in.
    """

    def __init__(
        self, mount: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
    ) -> None:
        self._mount, self._membership = mount, membership

    def ram_limit(self) -> int | None:
        """Bytes of main memory the process may use; None without a limit."""
        limits = [_limit(folder / names.limit) for folder, names in self._limited]
        return min((n for n in limits if n is not None), default=None)

    def ram_left(self) -> int | None:
        """Bytes of main memory it may still take, what is reclaimable included; None likewise."""
        left = []
        for folder, names in self._limited:
            limit, usage = _limit(folder / names.limit), _number(folder / names.usage)
            if limit is not None and usage is not None:
                left.append(max(0, limit - max(0, usage - _reclaimable(folder, names))))
        return min(left, default=None)

    def swap_left(self) -> int | None:
        """Bytes of swap it may still take; None without a limit."""
        left = []
        for folder, names in self._limited:
            limit, usage = _limit(folder / names.swap_limit), _number(folder / names.swap_usage)
            if limit is None or usage is None:
                continue
            if names is _V1:  # its figures are sums of memory and swap
                limit -= _limit(folder / names.limit) or 0
                usage -= _number(folder / names.usage) or 0
            left.append(max(0, limit - usage))
        return min(left, default=None)

    def cpu_limit(self) -> float | None:
        """Processors' worth of time the process gets; None without a limit."""
        found = []
        for folder in self._folders("cpu"):
            quota, period = (
                _number(folder / "cpu.cfs_quota_us"),
                _number(folder / "cpu.cfs_period_us"),
            )
            words = _text(folder / "cpu.max").split()
            if len(words) == 2 and all(word.isdigit() for word in words):
                quota, period = int(words[0]), int(words[1])
            if quota is not None and period and quota > 0:
                found.append(quota / period)
        return min(found, default=None)

    @functools.cached_property
    def _limited(self) -> list[tuple[Path, _Names]]:
        """Groups with a limit, looked for once: most machines have none and should pay nothing."""
        return [
            (folder, names)
            for folder in self._folders("memory")
            for names in (_V1, _V2)
            if _limit(folder / names.limit) is not None
        ]

    def _folders(self, controller: str) -> Iterator[Path]:
        """The process's group under a controller and all above it.

        Where a container does not see the host's names, what it sees begins at its own group.
        """
        for line in _text(self._membership).splitlines():
            number, _, rest = line.partition(":")
            controllers, _, name = rest.partition(":")
            if controller in controllers.split(","):
                roots = [self._mount / controller, self._mount / controllers]
            elif number == "0" and not controllers:
                roots = [self._mount, self._mount / "unified"]
            else:
                continue
            root = next((r for r in roots if r.is_dir()), None)
            if root is not None and ".." not in Path(name).parts:
                inside = root / name.lstrip("/")
                yield from (f for f in (inside, *inside.parents) if f == root or root in f.parents)


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii", "replace")
    except OSError:  # another system or version, or a group that is gone
        return ""


def _number(file: Path) -> int | None:
    """The whole number in a file; None where there is none."""
    text = _text(file).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _limit(file: Path) -> int | None:
    number = _number(file)
    return number if number is not None and 0 <= number < UNLIMITED else None


def _reclaimable(folder: Path, names: _Names) -> int:
    wanted = {names.stat_prefix + part for part in RECLAIMABLE}
    rows = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in wanted)


CONTAINER = Container()
