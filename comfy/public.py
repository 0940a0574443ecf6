"""Re-exports that write through: assigning to a public name reaches the module that owns it.

Custom nodes import public names such as `comfy.samplers` and also assign to them. A re-export
module ends with one call of `write_through`; from then on reading a re-exported name reads the
owner's current value and assigning replaces it in the owner. Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


class _PublicModule(ModuleType):
    """A module whose re-exported names live in their owners."""

    _routes: dict[str, tuple[str, str]]
    _first_values: dict[str, Any]
    _computed: Mapping[str, Callable[[], Any]]

    def __getattr__(self, name: str) -> Any:
        route = self.__dict__.get("_routes", {}).get(name)
        if route is not None:
            return getattr(sys.modules[route[0]], route[1])
        compute = self.__dict__.get("_computed", {}).get(name)
        if compute is not None:
            return compute()
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        route = self.__dict__.get("_routes", {}).get(name)
        if route is None:
            super().__setattr__(name, value)
        else:
            setattr(sys.modules[route[0]], route[1], value)

    def __delattr__(self, name: str) -> None:
        """Takes a replacement back: a re-exported name is public and gets its first value."""
        if name in self.__dict__.get("_routes", {}):
            setattr(self, name, self._first_values[name])
        else:
            super().__delattr__(name)

    def __dir__(self) -> list[str]:
        own = self.__dict__
        return sorted({*own, *own.get("_routes", {}), *own.get("_computed", {})})


def write_through(
    module_name: str,
    computed: Mapping[str, Callable[[], Any]] | None = None,
    /,
    **data_owners: str,
) -> None:
    """Make a module's imported names read from and write to the modules that own them.

    Functions and classes know their owner (`__module__`); anything else stays a plain name of the
    re-export unless `data_owners` names its owner. Modules and private names are left alone.

    Args:
        module_name: `__name__` of the re-export, which has imported all of its names.
        computed: name -> function called on every reading, for facts that must not be asked for at
            import. Assigning to such a name replaces it in the re-export only.
        **data_owners: name -> dotted name of the owning module.
    Raises:
        ValueError: An owner was named that is not imported or lacks the name.
    """
    module = sys.modules[module_name]
    routes: dict[str, tuple[str, str]] = {}
    for name, value in vars(module).items():
        if name.startswith("__") or isinstance(value, ModuleType) or name == "write_through":
            continue
        owner = sys.modules.get(data_owners.get(name) or getattr(value, "__module__", None) or "")
        if owner is None or owner is module:
            continue
        for candidate in (name, getattr(value, "__name__", name)):
            if getattr(owner, candidate, None) is value:
                routes[name] = (owner.__name__, candidate)
                break
    unknown = [name for name in data_owners if name not in routes]
    if unknown:
        raise ValueError(
            f"{module_name}: no owner holds {', '.join(unknown)}; "
            "import each name from the module named as its owner"
        )
    module.__dict__["_first_values"] = {name: module.__dict__.pop(name) for name in routes}
    module.__dict__.pop("write_through", None)
    module.__dict__.setdefault("__all__", []).clear()
    module.__dict__["__all__"].extend(
        sorted({*routes, *(n for n in vars(module) if not n.startswith("_"))})
    )
    module.__dict__["_routes"] = routes
    module.__dict__["_computed"] = dict(computed or {})
    module.__class__ = _PublicModule
