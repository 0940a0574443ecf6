"""Sizes of a network, read from the entries of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

Config = TypeVar("Config", bound="NetworkConfig")


@dataclass(frozen=True)
class NetworkConfig:
    """What the sizes of a network have in common: how a file's entries become them."""

    @classmethod
    def from_options(cls: type[Config], options: Mapping[str, Any]) -> Config:
        """From a configuration's entries; those of no concern here are left out."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in known})
