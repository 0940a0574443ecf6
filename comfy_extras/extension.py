"""The form of a module of schema nodes: one function makes its entry point."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from comfy_api.latest import ComfyExtension, io


def entrypoint_of(*nodes: type[io.ComfyNode]) -> Callable[[], Awaitable[ComfyExtension]]:
    """What the loader of built-in modules calls, for a module that offers `nodes`."""

    class ModuleExtension(ComfyExtension):
        """The nodes of a module."""

        async def get_node_list(self) -> list[type[io.ComfyNode]]:
            return list(nodes)

    async def comfy_entrypoint() -> ComfyExtension:
        return ModuleExtension()

    return comfy_entrypoint
