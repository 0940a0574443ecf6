"""Options of the server: network, folders, packs of nodes, the queue and the log."""

from __future__ import annotations

import argparse

from comfy.options.kinds import (
    LOG_LEVELS,
    NO_EFFECT,
    FreeMemory,
    LatentPreviewMethod,
    Verbosity,
    amount,
    count,
    exclusive,
    member_of,
    port_number,
    readable_directory,
    switches,
)


def add_network(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--listen",
        nargs="?",
        const="0.0.0.0,::",
        default="127.0.0.1",
        metavar="ADDRESS[,ADDRESS]",
        help="Addresses to bind (default 127.0.0.1; the bare flag: all of IPv4 and IPv6).",
    )
    add("--port", type=port_number, default=8188, help="TCP port (default 8188).")
    add(
        "--tls-keyfile",
        metavar="PATH",
        help="Private key; TLS is on when key and certificate are given.",
    )
    add("--tls-certfile", metavar="PATH", help="Certificate (chain) file.")
    add(
        "--enable-cors-header",
        nargs="?",
        const="*",
        default=None,
        metavar="ORIGIN",
        help="Send CORS headers with this origin (bare flag: *) in place of the same-origin guard.",
    )
    add(
        "--max-upload-size",
        type=amount,
        default=100.0,
        metavar="MB",
        help="Largest accepted request body in MiB (default 100).",
    )
    add(
        "--max-prompt-nodes",
        type=count,
        default=50_000,
        metavar="N",
        help="Most nodes that a prompt may have (default 50000; 0: no bound).",
    )
    add(
        "--comfy-api-base",
        default="https://api.comfy.org",
        metavar="URL",
        help="Base address for partner nodes. " + NO_EFFECT,
    )
    switches(
        group,
        ("--enable-compress-response-body", "gzip JSON and text answers if the client offers it."),
        ("--auto-launch", "Open the editor in the default browser once listening."),
        ("--disable-auto-launch", "Do not open the browser; wins over --auto-launch."),
        ("--dont-print-server", "Do not print the address lines at start."),
    )
    _add_access(group)


def _add_access(group: argparse._ArgumentGroup) -> None:
    """Who may use the server."""
    add = group.add_argument
    switches(
        group,
        ("--multi-user", "Per-user data; the user id comes from the comfy-user request header."),
        ("--auth", "Require a login or bearer token for every request."),
    )
    add(
        "--add-user",
        metavar="NAME[:ROLE]",
        help="Make or renew a user for --auth, print a token once, exit. ROLE: user, admin.",
    )
    add(
        "--user-quota",
        type=amount,
        default=0.0,
        metavar="GB",
        help="With --auth, what the files of one user may take, in GiB (default 0: no bound).",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="Further host name that browsers may use to reach this server (repeatable).",
    )


def add_directories(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--base-directory",
        metavar="PATH",
        help="Root of models, custom_nodes, input, output, temp, user (default: program dir).",
    )
    add(
        "--models-directory",
        metavar="PATH",
        help="Root of the model folders (default: <base>/models).",
    )
    add(
        "--output-directory",
        metavar="PATH",
        help="Where results are written (default: <base>/output).",
    )
    add(
        "--input-directory",
        metavar="PATH",
        help="Uploads and loader inputs (default: <base>/input).",
    )
    add(
        "--temp-directory", metavar="PATH", help="Holds the temp folder, emptied at start and exit."
    )
    add(
        "--user-directory",
        type=readable_directory,
        metavar="PATH",
        help="Existing directory for settings and workflows (default: <base>/user).",
    )
    add(
        "--extra-model-paths-config",
        nargs="+",
        action="append",
        metavar="PATH",
        help="YAML files that name additional model folders (repeatable).",
    )
    add(
        "--front-end-version",
        default="comfyanonymous/ComfyUI@latest",
        metavar="OWNER/REPO@VERSION",
        help="Frontend release to fetch. " + NO_EFFECT + " The pinned package is always served.",
    )
    add(
        "--front-end-root",
        type=readable_directory,
        metavar="PATH",
        help="Serve the frontend from this directory in place of the pinned package.",
    )
    add("--database-url", metavar="URL", help="SQLAlchemy URL. " + NO_EFFECT)
    add(
        "--default-hashing-function",
        choices=["md5", "sha1", "sha256", "sha512"],
        default="sha256",
        help="Hash that compares an upload with a file of the same name (default sha256).",
    )
    switches(group, ("--disable-metadata", "Do not embed prompt and workflow in saved files."))


def add_nodes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--whitelist-custom-nodes",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Packages still loaded with --disable-all-custom-nodes.",
    )
    switches(
        group,
        ("--disable-all-custom-nodes", "Load none of the packages in custom_nodes."),
        ("--disable-api-nodes", "Send a policy that keeps the page on this server."),
        ("--enable-manager", "Load the node manager (pip install comfyui-manager)."),
    )
    exclusive(
        group,
        ("--disable-manager-ui", "The manager without its routes and its part of the page."),
        ("--enable-manager-legacy-ui", "The manager with its older page."),
    )


def add_execution(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--preview-method",
        type=member_of(LatentPreviewMethod),
        choices=list(LatentPreviewMethod),
        default=None,
        metavar="{none,auto,latent2rgb,taesd}",
        help="Sampler preview; a prompt may override it (default: the best available for clients "
        "that understand previews, such as the editor, none for others).",
    )
    add(
        "--preview-size",
        type=count,
        default=512,
        metavar="PIXELS",
        help="Bounding square of previews (default 512).",
    )
    add(
        "--max-text-size",
        type=amount,
        default=64.0,
        metavar="MILLIONS",
        help="Longest text a node may return, in 2^20 characters; all of a prompt may be 8 times "
        "as long (default 64; 0: any).",
    )
    add(
        "--on-restart",
        choices=["resume", "paused", "clear"],
        default="resume",
        help="What happens to prompts left in the queue by the previous run (default resume).",
    )
    add(
        "--restart-after",
        type=amount,
        default=30.0,
        metavar="SECONDS",
        help="The supervisor restarts the server when a cancelled prompt has not stopped by then, "
        "as in a native call that never returns (default 30; 0: never).",
    )
    _add_caches(group)
    switches(
        group,
        ("--no-supervisor", "Do not run under the parent that restarts after a crash."),
        ("--no-journal", "Keep queue and history in memory only."),
    )


def _add_caches(group: argparse._ArgumentGroup) -> None:
    """What is kept of the results of nodes."""
    cache = group.add_mutually_exclusive_group()
    cache.add_argument(
        "--cache-classic",
        action="store_true",
        help="Keep results for the nodes of the last prompt (the default).",
    )
    cache.add_argument(
        "--cache-lru",
        type=count,
        default=0,
        metavar="N",
        help="Keep the last N node results across prompts.",
    )
    cache.add_argument("--cache-none", action="store_true", help="Keep nothing; every node runs.")
    cache.add_argument(
        "--cache-ram",
        type=amount,
        nargs="*",
        action=FreeMemory,
        default=0.0,
        metavar="GB",
        help="Keep results until free RAM drops below this (bare flag: 4; a second number, which "
        "newer launchers pass, is ignored).",
    )


def add_platform(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--verbose",
        nargs="*",
        action=Verbosity,
        default="INFO",
        metavar=("LEVEL", "FILE"),
        help="Log level (default INFO; bare flag: DEBUG), or that of a file beside the terminal "
        f"(repeatable). Levels: {', '.join(LOG_LEVELS)}.",
    )
    group.set_defaults(log_files=[])
    switches(
        group,
        ("--log-stdout", "Normal log lines to standard output, errors to standard error."),
        ("--quick-test-for-ci", "Load everything, then exit 0 before listening."),
        ("--windows-standalone-build", "Defaults of the packaged Windows build. " + NO_EFFECT),
    )
