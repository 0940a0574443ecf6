"""Command-line options: the parser, and the one namespace `args` that the program reads.

`args` holds every option's default until `main.py` fills it with what the user typed (`fill`).
Nothing is read from the command line when this module is imported. Names and defaults are those
that launch scripts, containers and desktop wrappers of this ecosystem already pass; an option that
means nothing here is accepted, says so in its help, and is reported once at start (`ineffective`).
One file, for it is one table: whoever looks an option up finds all of them here.
"""

from __future__ import annotations

import argparse
import enum
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
NO_EFFECT = "Accepted so that existing launch scripts keep working; has no effect here."


class LatentPreviewMethod(enum.Enum):
    """How the picture-in-progress of a sampler is made."""

    NoPreviews = "none"
    Auto = "auto"
    Latent2RGB = "latent2rgb"
    TAESD = "taesd"

    @classmethod
    def from_string(cls, value: str) -> LatentPreviewMethod | None:
        """Returns the member spelled `value` on the command line, or None."""
        return next((member for member in cls if member.value == value), None)


class PerformanceFeature(enum.Enum):
    """Opt-in speed options of `--fast` that may change results slightly."""

    Fp16Accumulation = "fp16_accumulation"
    Fp8MatrixMultiplication = "fp8_matrix_mult"
    CublasOps = "cublas_ops"
    AutoTune = "autotune"
    CpuBf16 = "cpu_bf16"


class _FillAll(argparse.Action):
    """Stores the given enum members; the bare flag stores all of them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002  argparse's signature
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        setattr(namespace, self.dest, set(values) or set(PerformanceFeature))


class _FreeMemory(argparse.Action):
    """Stores the first of up to two numbers of gigabytes; the bare flag stores 4."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if len(values) > 2:
            parser.error(f"{option_string} takes at most two numbers, got {len(values)}")
        setattr(namespace, self.dest, values[0] if values else 4.0)


class _Verbosity(argparse.Action):
    """Stores the terminal's level, or that of a file named after it. The bare flag: DEBUG."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        level, *files = values or ["DEBUG"]
        if level not in LOG_LEVELS or len(files) > 1:
            parser.error(f"{option_string} takes a level ({', '.join(LOG_LEVELS)}) and a file")
        if files:
            namespace.log_files = [*namespace.log_files, (level, files[0])]
        else:
            setattr(namespace, self.dest, level)


def _switches(group: Any, *rows: tuple[str, str]) -> None:
    for flag, text in rows:
        group.add_argument(flag, action="store_true", help=text)


def _exclusive(parser: argparse.ArgumentParser, *rows: tuple[str, str]) -> None:
    _switches(parser.add_mutually_exclusive_group(), *rows)


def _readable_directory(text: str) -> str:
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not an existing directory; create it first")
    return str(folder.resolve())


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; expected 0 (any free one) to 65535")
    return port


def _add_network(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--listen",
        nargs="?",
        const="0.0.0.0,::",
        default="127.0.0.1",
        metavar="ADDRESS[,ADDRESS]",
        help="Addresses to bind (default 127.0.0.1; the bare flag: all of IPv4 and IPv6).",
    )
    add("--port", type=_port, default=8188, help="TCP port (default 8188).")
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
        type=float,
        default=100.0,
        metavar="MB",
        help="Largest accepted request body in MiB (default 100).",
    )
    add(
        "--max-prompt-nodes",
        type=int,
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
    _switches(
        parser,
        ("--enable-compress-response-body", "gzip JSON and text answers if the client offers it."),
        ("--auto-launch", "Open the editor in the default browser once listening."),
        ("--disable-auto-launch", "Do not open the browser; wins over --auto-launch."),
        ("--dont-print-server", "Do not print the address lines at start."),
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
        type=float,
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


def _add_directories(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
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
        type=_readable_directory,
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
        type=_readable_directory,
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
    _switches(parser, ("--disable-metadata", "Do not embed prompt and workflow in saved files."))


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--whitelist-custom-nodes",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Packages still loaded with --disable-all-custom-nodes.",
    )
    _switches(
        parser,
        ("--disable-all-custom-nodes", "Load none of the packages in custom_nodes."),
        ("--disable-api-nodes", "Send a policy that keeps the page on this server."),
        ("--enable-manager", "Load the node manager (pip install comfyui-manager)."),
    )
    _exclusive(
        parser,
        ("--disable-manager-ui", "The manager without its routes and its part of the page."),
        ("--enable-manager-legacy-ui", "The manager with its older page."),
    )


def _add_devices(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cuda-device", metavar="INDEX", help="Make only this device visible.")
    add(
        "--default-device",
        type=int,
        metavar="INDEX",
        help="Move this device to the front of the list.",
    )
    add("--directml", type=int, nargs="?", const=-1, default=None, help="DirectML. " + NO_EFFECT)
    add("--oneapi-device-selector", metavar="TEXT", help="Value for the oneAPI device selector.")
    add("--reserve-vram", type=float, metavar="GB", help="Accelerator memory to leave free.")
    add(
        "--idle-unload",
        type=float,
        metavar="SECONDS",
        help="Unload models that nobody used for this long (default: never).",
    )
    add(
        "--async-offload",
        type=int,
        nargs="?",
        const=2,
        default=None,
        metavar="STREAMS",
        help="Asynchronous weight transfer with this many streams (bare flag: 2).",
    )
    _exclusive(
        parser,
        ("--cuda-malloc", "Ask for the asynchronous CUDA allocator."),
        ("--disable-cuda-malloc", "Never use the asynchronous CUDA allocator."),
    )
    _exclusive(
        parser,
        ("--gpu-only", "Keep and run everything on the accelerator."),
        ("--highvram", "Leave models on the accelerator after use."),
        ("--normalvram", "Override an automatic low-memory choice."),
        ("--lowvram", "Hold the diffusion model partly off the accelerator."),
        ("--novram", "Hold as little as possible on the accelerator."),
        ("--cpu", "Run on the CPU."),
    )
    _switches(
        parser,
        ("--disable-ipex-optimize", NO_EFFECT),
        ("--disable-async-offload", "No asynchronous weight transfer."),
        ("--force-non-blocking", "Non-blocking transfers wherever a tensor allows it."),
        ("--disable-smart-memory", "Unload models after every prompt."),
        ("--disable-pinned-memory", "No page-locked host memory."),
        ("--disable-dynamic-vram", "Use the classic model patcher (residency per module)."),
        ("--enable-dynamic-vram", "Use the dynamic model patcher (residency per weight)."),
        ("--mmap-torch-files", "Memory-map pickle-format checkpoints."),
        ("--disable-mmap", "Read safetensors without memory mapping."),
        ("--disable-huge-pages", "Keep large weights in pages of the usual size."),
    )


def _add_precision(parser: argparse.ArgumentParser) -> None:
    _exclusive(
        parser,
        ("--force-fp32", "float32 everywhere."),
        ("--force-fp16", "float16; also turns on --fp16-unet."),
    )
    unet = [
        f"--{kind}-unet"
        for kind in ("fp32", "fp64", "bf16", "fp16", "fp8_e4m3fn", "fp8_e5m2", "fp8_e8m0fnu")
    ]
    vae = [f"--{kind}-vae" for kind in ("fp16", "fp32", "bf16")]
    text = [f"--{kind}-text-enc" for kind in ("fp8_e4m3fn", "fp8_e5m2", "fp16", "fp32", "bf16")]
    _exclusive(parser, *((flag, "Number type of the diffusion model.") for flag in unet))
    _exclusive(parser, *((flag, "Number type of the VAE.") for flag in vae))
    _exclusive(parser, *((flag, "Storage type of text encoder weights.") for flag in text))
    _exclusive(
        parser,
        ("--use-split-cross-attention", "Force split attention."),
        ("--use-quad-cross-attention", "Force sub-quadratic attention."),
        ("--use-pytorch-cross-attention", "Force torch's fused attention."),
        ("--use-sage-attention", "Force SageAttention."),
        ("--use-flash-attention", "Force FlashAttention."),
        ("--use-xformers-attention", "Force xFormers' attention."),
    )
    _exclusive(
        parser,
        ("--force-upcast-attention", "Attention in float32."),
        ("--dont-upcast-attention", "Never upcast attention."),
    )
    parser.add_argument(
        "--fast",
        nargs="*",
        type=PerformanceFeature,
        default=set(),
        action=_FillAll,
        metavar="FEATURE",
        help="Speed options that may change results (bare: all).",
    )
    _switches(
        parser,
        ("--cpu-vae", "Run the VAE on the CPU."),
        ("--force-channels-last", "Channels-last memory layout for convolutions."),
        ("--supports-fp8-compute", "Assume that the device can compute in fp8."),
        ("--deterministic", "Prefer deterministic kernels."),
        (
            "--paper-formulas",
            "Published formulas also where today's pictures are made by others (RescaleCFG, FreSca "
            "and APG on videos, HyperTile, ...; docs/sampling.md lists them).",
        ),
        ("--disable-xformers", "Ignore xformers."),
        ("--disable-cpu-tuning", "CPU networks in torch's usual layouts and kernels only."),
    )


def _add_execution(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--preview-method",
        type=LatentPreviewMethod,
        choices=list(LatentPreviewMethod),
        default=None,
        metavar="{none,auto,latent2rgb,taesd}",
        help="Sampler preview; a prompt may override it (default: the best available for clients "
        "that understand previews, such as the editor, none for others).",
    )
    add(
        "--preview-size",
        type=int,
        default=512,
        metavar="PIXELS",
        help="Bounding square of previews (default 512).",
    )
    add(
        "--max-text-size",
        type=float,
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
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="The supervisor restarts the server when a cancelled prompt has not stopped by then, "
        "as in a native call that never returns (default 30; 0: never).",
    )
    cache = parser.add_mutually_exclusive_group()
    cache.add_argument(
        "--cache-classic",
        action="store_true",
        help="Keep results for the nodes of the last prompt (the default).",
    )
    cache.add_argument(
        "--cache-lru",
        type=int,
        default=0,
        metavar="N",
        help="Keep the last N node results across prompts.",
    )
    cache.add_argument("--cache-none", action="store_true", help="Keep nothing; every node runs.")
    cache.add_argument(
        "--cache-ram",
        type=float,
        nargs="*",
        action=_FreeMemory,
        default=0.0,
        metavar="GB",
        help="Keep results until free RAM drops below this (bare flag: 4; a second number, which "
        "newer launchers pass, is ignored).",
    )
    _switches(
        parser,
        ("--no-supervisor", "Do not run under the parent that restarts after a crash."),
        ("--no-journal", "Keep queue and history in memory only."),
    )


def _add_platform(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose",
        nargs="*",
        action=_Verbosity,
        default="INFO",
        metavar=("LEVEL", "FILE"),
        help="Log level (default INFO; bare flag: DEBUG), or that of a file beside the terminal "
        f"(repeatable). Levels: {', '.join(LOG_LEVELS)}.",
    )
    parser.set_defaults(log_files=[])
    _switches(
        parser,
        ("--log-stdout", "Normal log lines to standard output, errors to standard error."),
        ("--quick-test-for-ci", "Load everything, then exit 0 before listening."),
        ("--windows-standalone-build", "Defaults of the packaged Windows build. " + NO_EFFECT),
    )


def _add_newer(parser: argparse.ArgumentParser) -> None:
    """Options that newer servers of the same family know and newer launchers may pass."""
    add = parser.add_argument
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
    _switches(
        parser,
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


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of every option."""
    parser = argparse.ArgumentParser(
        prog="latentloom", description="Node-graph diffusion inference server."
    )
    for title, add in (
        ("network and HTTP", _add_network),
        ("directories and files", _add_directories),
        ("nodes and extensions", _add_nodes),
        ("devices and memory", _add_devices),
        ("precision and numerics", _add_precision),
        ("execution", _add_execution),
        ("logging and platform", _add_platform),
        ("newer servers' options", _add_newer),
    ):
        add(parser.add_argument_group(title))  # type: ignore[arg-type]
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
