"""Options that newer servers of this ecosystem know and newer launchers may pass."""

from __future__ import annotations

import argparse

from comfy.options.kinds import NO_EFFECT, switches


def add_newer(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--date-output-format",
        metavar="FORMAT",
        default="%Y-%m-%d",
        help="Name of the folder of --date-based-output: codes of strftime, or YYYY, MM and DD; "
        "a slash makes folders in folders (default YYYY-MM-DD).",
    )
    add(
        "--disabled-nodes-config",
        metavar="PATH",
        help="YAML file with a list of node names to leave out.",
    )
    add("--vram-headroom", type=float, metavar="GB", help=NO_EFFECT)
    add(
        "--feature-flag",
        action="append",
        default=[],
        metavar="KEY[=VALUE]",
        help="Add to what /features says (repeatable); what the server itself says stays.",
    )
    switches(
        group,
        ("--list-feature-flags", "Print what /features says as JSON and exit."),
        (
            "--date-based-output",
            "Save results in a sub-folder of the day below the output folder; models that are "
            "saved stay where loaders find them.",
        ),
        *(
            (flag, NO_EFFECT)
            for flag in (
                "--disable-partner-nodes",
                "--disable-assets",
                "--enable-assets",
                "--enable-asset-hashing",
                "--debug-hang",
                "--fp16-intermediates",
                "--enable-triton-backend",
                "--disable-triton-backend",
                "--use-ck-attention",
                "--high-ram",
                "--disable-nvml-pressure",
                "--fast-disk",
                "--disable-fast-disk",
                "--disable-cuda-graphs",
                "--disable-comfy-compiler",
                "--assert-graph-breaks",
            )
        ),
    )
    add(
        "--offline",
        dest="disable_api_nodes",
        action="store_true",
        help="Same as --disable-api-nodes.",
    )
