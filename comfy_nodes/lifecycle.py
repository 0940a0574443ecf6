"""What main and custom nodes call around the node table: filling it, and cancelling what runs."""

from __future__ import annotations

from collections.abc import Iterable

from comfy import interrupt
from comfy_nodes import custom_packs, extras, table
from comfy_nodes.custom_packs import PackSelection


def before_node_execution() -> None:
    """Stops here if the running prompt was cancelled; custom nodes call it in long loops."""
    interrupt.throw_exception_if_processing_interrupted()


def interrupt_processing(value: bool = True) -> None:
    """Asks the running prompt to stop, or with False takes the request back."""
    interrupt.interrupt_current_processing(value)


async def load_custom_node(
    module_path: str, ignore: Iterable[str] = (), module_parent: str = "custom_nodes"
) -> bool:
    """Loads one pack into the node table; see `custom_packs.load_custom_node`."""
    return await custom_packs.load_custom_node(
        module_path, ignore, module_parent, add_nodes=table.add_nodes
    )


async def init_builtin_extra_nodes() -> list[str]:
    """Loads the optional built-in nodes; returns the names of modules that failed."""
    return await extras.init_builtin_extra_nodes(table.add_nodes)


async def init_external_custom_nodes(selection: PackSelection | None = None) -> list[str]:
    """Loads all packs; returns the paths of those that failed."""
    return await custom_packs.init_external_custom_nodes(
        table.add_nodes, list(table.NODE_CLASS_MAPPINGS), selection or PackSelection()
    )


async def init_extra_nodes(
    init_custom_nodes: bool = True,
    init_api_nodes: bool = True,  # noqa: ARG001 - there are no paid nodes; the argument is public
    selection: PackSelection | None = None,
) -> list[str]:
    """Loads everything beyond the core nodes.

    Args:
        init_custom_nodes: Load packs too.
        init_api_nodes: Accepted for compatibility.
        selection: Which packs.

    Returns:
        Names of built-in modules that failed.
    """
    failed = await init_builtin_extra_nodes()
    if init_custom_nodes:
        await init_external_custom_nodes(selection)
    return failed
