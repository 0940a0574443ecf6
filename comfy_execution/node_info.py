"""The entry of a node class in ``/object_info``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from comfy_execution.spec import NodeSpec
from comfy_execution.wire import dump_json


def node_info(spec: NodeSpec, display_name: str | None = None) -> dict[str, Any]:
    """Describes a node class for editors and clients.

    Args:
        spec: The class; a schema-declared one describes itself (``node_info`` of its spec).
        display_name: Name the package gave it; the class name if None.
    Returns:
        Strict JSON data in the public form.
    """
    own_info = getattr(spec, "node_info", None)
    info = own_info() if own_info is not None else _classic_info(spec, display_name)
    described: dict[str, Any] = json.loads(dump_json(info))  # much faster than `strict_json`
    return described


def _classic_info(spec: NodeSpec, display_name: str | None) -> dict[str, Any]:
    node_class = spec.node_class
    types = spec.return_types
    names = getattr(node_class, "RETURN_NAMES", types)
    sections = spec.sections
    info: dict[str, Any] = {
        "input": _listed_sections(sections),
        "input_order": {name: list(entries) for name, entries in sections.items()},
        "output": list(types),
        "output_is_list": _list_flags(node_class, types),
        "output_name": [names] if isinstance(names, str) else list(names),
        "name": spec.class_type,
        "display_name": display_name or spec.class_type,
        "description": getattr(node_class, "DESCRIPTION", ""),
        "python_module": getattr(node_class, "RELATIVE_PYTHON_MODULE", "nodes"),
        "category": getattr(node_class, "CATEGORY", "sd"),
        "output_node": spec.is_output,
    }
    for key, attribute in (("output_tooltips", "OUTPUT_TOOLTIPS"), ("api_node", "API_NODE")):
        if hasattr(node_class, attribute):
            info[key] = getattr(node_class, attribute)
    for key, attribute in (
        ("deprecated", "DEPRECATED"),
        ("experimental", "EXPERIMENTAL"),
        ("dev_only", "DEV_ONLY"),
        ("is_input_list", "INPUT_IS_LIST"),
        ("has_intermediate_output", "HAS_INTERMEDIATE_OUTPUT"),
    ):
        if getattr(node_class, attribute, False):
            info[key] = True
    for key, attribute in (
        ("search_aliases", "SEARCH_ALIASES"),
        ("essentials_category", "ESSENTIALS_CATEGORY"),
    ):
        if getattr(node_class, attribute, None):
            info[key] = getattr(node_class, attribute)
    return info


def _listed_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Sections as plain dicts; an entry keeps the form the class gave it."""
    return {section: dict(entries) for section, entries in sections.items()}


def _list_flags(node_class: Any, types: Sequence[Any]) -> list[bool]:
    """One flag for each output, as declared; all false where the class declares none."""
    flags = getattr(node_class, "OUTPUT_IS_LIST", None)
    return [bool(flag) for flag in flags] if flags is not None else [False] * len(types)
