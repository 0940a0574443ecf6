"""Options of workers: prompts run in processes of their own, or in actors of a Ray cluster."""

from __future__ import annotations

import argparse

from comfy.options.kinds import whole_number

worker_count = whole_number("number of workers", "0 or more")


def add_workers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--workers",
        type=worker_count,
        default=0,
        metavar="N",
        help="Run prompts in N processes beside the server's, each with a device of its own, or "
        "without accelerator with its share of the threads (default 0: in the server's process).",
    )
    add(
        "--ray",
        nargs="?",
        const="auto",
        default=None,
        metavar="ADDRESS",
        help="Run prompts in actors of this Ray cluster, on machines that share this one's folders "
        "(bare flag: the cluster this machine belongs to; 'local': one made for this server).",
    )
    add(
        "--ray-workers",
        type=worker_count,
        default=0,
        metavar="N",
        help="How many of them (default: as many as the cluster has accelerators, or 1).",
    )
