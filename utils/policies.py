"""From arguments to policies: the frozen objects that every part of the program is built with.

`main.py` calls these once. Each names the options it reads and nothing else does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comfy.devices.policies import MemoryPolicy, PrecisionPolicy
    from comfy_server import ServerOptions

PROGRAM_FOLDER = Path(__file__).resolve().parent.parent
MIB = 1024 * 1024
GIB = 1024 * MIB


def memory_policy(args: argparse.Namespace) -> MemoryPolicy:
    """How device and host memory are used."""
    from comfy.devices.policies import MemoryPolicy, VRAMState

    states = {
        "highvram": VRAMState.HIGH_VRAM,
        "normalvram": VRAMState.NORMAL_VRAM,
        "lowvram": VRAMState.LOW_VRAM,
        "novram": VRAMState.NO_VRAM,
    }
    dynamic = {True: True, False: None}[args.enable_dynamic_vram]
    return MemoryPolicy(
        cpu=args.cpu,
        vram_state=next((state for name, state in states.items() if getattr(args, name)), None),
        gpu_only=args.gpu_only,
        reserve_vram_bytes=None if args.reserve_vram is None else int(args.reserve_vram * GIB),
        async_offload_streams=0 if args.disable_async_offload else args.async_offload,
        smart_memory=not args.disable_smart_memory,
        pinned_memory=not args.disable_pinned_memory,
        force_non_blocking=args.force_non_blocking,
        memory_map=not args.disable_mmap,
        huge_pages=not args.disable_huge_pages,
        idle_unload_s=args.idle_unload,
        dynamic_residency=False if args.disable_dynamic_vram else dynamic,
    )


def precision_policy(args: argparse.Namespace) -> PrecisionPolicy:
    """Which number types networks store and compute in."""
    import torch

    from comfy.devices.policies import PrecisionPolicy

    dtypes = {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8_e4m3fn": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "fp8_e8m0fnu": torch.float8_e8m0fnu,
    }

    def asked(suffix: str) -> torch.dtype | None:
        chosen = (d for name, d in dtypes.items() if getattr(args, f"{name}_{suffix}", False))
        return next(chosen, None)

    attention = {
        "split": args.use_split_cross_attention,
        "sub_quad": args.use_quad_cross_attention,
        "pytorch": args.use_pytorch_cross_attention,
        "sage": args.use_sage_attention,
        "flash": args.use_flash_attention,
        "xformers": args.use_xformers_attention,
    }
    return PrecisionPolicy(
        force_fp32=args.force_fp32,
        force_fp16=args.force_fp16,
        unet_dtype=asked("unet"),
        vae_dtype=asked("vae"),
        text_encoder_dtype=asked("text_enc"),
        cpu_vae=args.cpu_vae,
        cpu_bf16=any(feature.value == "cpu_bf16" for feature in args.fast),
        tune_cpu=not args.disable_cpu_tuning,
        force_channels_last=args.force_channels_last,
        supports_fp8_compute=args.supports_fp8_compute,
        force_upcast_attention=args.force_upcast_attention,
        dont_upcast_attention=args.dont_upcast_attention,
        deterministic=args.deterministic,
        paper_formulas=args.paper_formulas,
        attention=next((name for name, on in attention.items() if on), None),
        disable_xformers=args.disable_xformers,
        fast=frozenset(feature.value for feature in args.fast),
    )


def frontend_folder(args: argparse.Namespace) -> Path:
    """Static folder of the editor: the one named by the arguments, else the pinned package's.

    Raises:
        SystemExit: The package is not installed.
    """
    if args.front_end_root:
        return Path(args.front_end_root)
    spec = importlib.util.find_spec("comfyui_frontend_package")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            "the package comfyui-frontend-package is not installed: start with "
            "`python run.py serve`, or name a folder with --front-end-root"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "static"


def feature_flag(text: str) -> tuple[str, Any]:
    """`KEY` (true) or `KEY=VALUE`; the value is JSON, or else text."""
    key, has_value, value = text.partition("=")
    if not has_value:
        return key, True
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def disabled_nodes(path: str) -> list[str]:
    """Names of the nodes that a YAML file wants left out: a list, alone or as its only value.

    Raises:
        SystemExit: The file is something else.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        sys.exit(f"--disabled-nodes-config: {path} cannot be read: {error}")
    if isinstance(content, dict) and len(content) == 1:
        content = next(iter(content.values()))
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        sys.exit(f"{path} must hold a list of node names, such as '- KSampler'")
    return content


def server_options(args: argparse.Namespace, argv: Sequence[str]) -> ServerOptions:
    """Network, security and presentation policy of the HTTP side."""
    from comfy_server import ServerOptions

    return ServerOptions(
        listen=tuple(part.strip() for part in args.listen.split(",") if part.strip()),
        port=args.port,
        tls_keyfile=Path(args.tls_keyfile) if args.tls_keyfile else None,
        tls_certfile=Path(args.tls_certfile) if args.tls_certfile else None,
        cors_origin=args.enable_cors_header,
        allowed_hosts=tuple(args.allow_host),
        max_upload_bytes=round(args.max_upload_size * MIB),
        max_prompt_nodes=args.max_prompt_nodes,
        compress=args.enable_compress_response_body,
        confine_page=args.disable_api_nodes,
        multi_user=args.multi_user,
        auth=args.auth,
        frontend_root=frontend_folder(args),
        extension_root=PROGRAM_FOLDER / "web",
        hashing_function=args.default_hashing_function,
        preview_size=args.preview_size,
        feature_flags=dict(map(feature_flag, args.feature_flag)),
        user_quota_bytes=int(args.user_quota * GIB),
        argv=("main.py", *argv),
        print_addresses=not args.dont_print_server,
    )
