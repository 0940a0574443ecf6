"""What a route takes and answers, written beside its handler; `openapi` gathers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Schema = dict[str, Any]
HandlerType = TypeVar("HandlerType", bound=Callable[..., Any])

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "string", "enum": ["true", "false"]}
INTEGER: Schema = {"type": "integer"}
OBJECT: Schema = {"type": "object"}
TEXTS: Schema = {"type": "array", "items": TEXT}
OBJECTS: Schema = {"type": "array", "items": OBJECT}
ANYTHING: Schema = {}
EMPTY = "empty"  # an answer without a body
BINARY = "binary"
PLAIN = "plain"


def shape(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    """An object with these members; others may be there."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
    }


def ref(name: str) -> Schema:
    """A schema of `openapi.SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


@dataclass(frozen=True)
class Operation:
    """The description of one handler.

    Attributes:
        query: Parameter name -> schema; a name that ends in `!` is required.
        path: Path parameter -> schema, where it is not just text.
        body: Schema of the JSON body, `BINARY`, or a form as {"multipart": schema}.
        body_required: Whether a request without a body is refused.
        answers: Status -> schema, `EMPTY`, `BINARY` or `PLAIN`.
        hidden: The route is no part of the documented interface.
    """

    query: Mapping[str, Schema] = field(default_factory=dict)
    path: Mapping[str, Schema] = field(default_factory=dict)
    body: Schema | str | None = None
    body_required: bool = True
    answers: Mapping[int, Schema | str] = field(default_factory=dict)
    hidden: bool = False


ATTRIBUTE = "__operation__"


def describe(
    ok: Schema | str = ANYTHING,
    *,
    query: Mapping[str, Schema] | None = None,
    path: Mapping[str, Schema] | None = None,
    body: Schema | str | None = None,
    body_required: bool = True,
    answers: Mapping[int, Schema | str] | None = None,
    status: int = 200,
    hidden: bool = False,
) -> Callable[[HandlerType], HandlerType]:
    """Attaches a description to a handler; it goes below the route decorator.

    Args:
        ok: What the answer of `status` holds.
        answers: Further statuses; 401, 403, 413 and 429 are added to every operation.
    """
    operation = Operation(
        query or {}, path or {}, body, body_required, {status: ok, **(answers or {})}, hidden
    )

    def attach(handler: HandlerType) -> HandlerType:
        setattr(handler, ATTRIBUTE, operation)
        return handler

    return attach
