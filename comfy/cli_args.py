"""Command-line options: the parser, and the one namespace `args` that the program reads.

`args` holds every option's default until `main.py` fills it with what the user typed (`fill`).
Nothing is read from the command line when this module is imported. The options themselves are in
`comfy.options`, by subject. Names and defaults are those that launch scripts, containers and
desktop wrappers of this ecosystem already pass; an option that means nothing here is accepted, says
so in its help, and is reported once at start (`ineffective`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from comfy.options.computing import add_devices, add_precision
from comfy.options.kinds import NO_EFFECT, LatentPreviewMethod, PerformanceFeature
from comfy.options.newer import add_newer
from comfy.options.serving import (
    add_directories,
    add_execution,
    add_network,
    add_nodes,
    add_platform,
)
from comfy.options.workers import add_workers

__all__ = [
    "NO_EFFECT",
    "LatentPreviewMethod",
    "PerformanceFeature",
    "args",
    "build_parser",
    "fill",
    "ineffective",
]


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of every option."""
    parser = argparse.ArgumentParser(
        prog="latentloom", description="Node-graph diffusion inference server."
    )
    for title, add in (
        ("network and HTTP", add_network),
        ("directories and files", add_directories),
        ("nodes and extensions", add_nodes),
        ("devices and memory", add_devices),
        ("precision and numerics", add_precision),
        ("execution", add_execution),
        ("several workers", add_workers),
        ("logging and platform", add_platform),
        ("newer servers' options", add_newer),
    ):
        add(parser.add_argument_group(title))
    return parser


def ineffective(parser: argparse.ArgumentParser, argv: Iterable[str]) -> list[str]:
    """Lists the options in `argv` that are accepted but change nothing here."""
    inert = {
        flag
        for action in parser._actions
        if NO_EFFECT in (action.help or "")
        for flag in action.option_strings
    }
    return [word for word in (item.split("=", 1)[0] for item in argv) if word in inert]


def _completed(parsed: argparse.Namespace) -> argparse.Namespace:
    """Fills in what options imply for one another."""
    parsed.fp16_unet |= parsed.force_fp16
    parsed.enable_manager |= parsed.enable_manager_legacy_ui
    # Older clients take every binary frame for a result, so previews are not sent to them unasked.
    parsed.automatic_previews = parsed.preview_method is None
    if parsed.automatic_previews:
        parsed.preview_method = LatentPreviewMethod.NoPreviews
    return parsed


args: argparse.Namespace = _completed(build_parser().parse_args([]))


def fill(argv: Sequence[str]) -> argparse.Namespace:
    """Parses `argv` into `args`, in place, so that early importers see the values.

    Raises:
        SystemExit: status 2 for an unknown option or value, 0 for --help.
    """
    args.__dict__.update(vars(_completed(build_parser().parse_args(list(argv)))))
    return args
