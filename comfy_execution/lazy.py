"""Attributes that are computed when first read and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")
Self = TypeVar("Self", bound="lazy[Any]")


class lazy(Generic[Value]):
    """As `functools.cached_property`, without the lock that older Pythons take at each first read.

    A spec is made for every class of every prompt and read by one thread: the lock would be a
    fifth of what validating a prompt takes.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self: Self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self: Self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
