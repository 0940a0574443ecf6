"""The error objects of prompt validation, exactly as clients read them."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from comfy_execution.failures import full_type_name, printable
from comfy_execution.spec import InputInfo
from comfy_execution.wire import strict_json

Error = dict[str, Any]

LONGEST_OPTION_LIST = 20
MOST_CYCLE_NODES = 100


def make_error(kind: str, message: str, details: str = "", **extra_info: Any) -> Error:
    """One error object."""
    return {"type": kind, "message": message, "details": details, "extra_info": extra_info}


def input_config(info: InputInfo) -> list[Any]:
    """An input's declaration as errors show it: [type, options]."""
    config: list[Any] = strict_json([info.type, dict(info.options)])
    return config


def missing_class_type(node_id: str) -> Error:
    return make_error(
        "invalid_prompt",
        "Cannot execute because a node is missing the class_type property.",
        f"Node ID '#{node_id}'",
    )


def unknown_class(node_id: str, class_type: str, title: str) -> Error:
    return make_error(
        "invalid_prompt",
        f"Cannot execute because node {class_type} does not exist.",
        f"Node ID '#{node_id}'",
        node_id=node_id,
        class_type=class_type,
        node_title=title,
    )


def not_a_prompt(details: str) -> Error:
    return make_error("invalid_prompt", "The prompt is not a graph in API format", details)


def no_outputs() -> Error:
    return make_error("prompt_no_outputs", "Prompt has no outputs")


def outputs_failed(output_errors: Sequence[Error]) -> Error:
    """The summary: one line for each error of the output nodes themselves."""
    lines = [f"{error['message']}: {error['details']}" for error in output_errors]
    return make_error(
        "prompt_outputs_failed_validation", "Prompt outputs failed validation", "\n".join(lines)
    )


def required_input_missing(name: str, shown_name: str) -> Error:
    return make_error(
        "required_input_missing", "Required input is missing", shown_name, input_name=name
    )


def bad_link(name: str, info: InputInfo, value: Any) -> Error:
    return make_error(
        "bad_linked_input",
        "Bad linked input, must be a length-2 list of [node_id, slot_index]",
        name,
        input_name=name,
        input_config=input_config(info),
        received_value=strict_json(value),
    )


def missing_source(name: str, info: InputInfo, link: list[Any]) -> Error:
    return make_error(
        "linked_node_not_found",
        "Linked node does not exist",
        f"{name} is linked to node '{link[0]}', which is not in the prompt; link it to a node that "
        "is, or leave the input out",
        input_name=name,
        input_config=input_config(info),
        linked_node=link,
    )


def bad_slot(name: str, info: InputInfo, link: list[Any], class_type: str, count: int) -> Error:
    valid = f"valid are 0 to {count - 1}" if count else "it has none"
    return make_error(
        "linked_output_not_found",
        "Linked output does not exist",
        f"{name} is linked to output {link[1]} of node '{link[0]}' ({class_type}), which has "
        f"{count} outputs; {valid}",
        input_name=name,
        input_config=input_config(info),
        linked_node=link,
        output_count=count,
    )


def type_mismatch(name: str, info: InputInfo, received: Any, link: list[Any]) -> Error:
    return make_error(
        "return_type_mismatch",
        "Return type mismatch between linked nodes",
        f"{name}, received_type({received}) mismatch input_type({info.type})",
        input_name=name,
        input_config=input_config(info),
        received_type=strict_json(received),
        linked_node=link,
    )


def not_convertible(name: str, info: InputInfo, value: Any, error: Exception) -> Error:
    return make_error(
        "invalid_input_type",
        f"Failed to convert an input value to a {info.type} value",
        f"{name}, {printable(value)}, {error}",
        input_name=name,
        input_config=input_config(info),
        received_value=strict_json(value),
        exception_message=str(error),
    )


def out_of_range(name: str, info: InputInfo, value: Any, bound: str) -> Error:
    kind, words = {
        "min": ("value_smaller_than_min", "smaller than min"),
        "max": ("value_bigger_than_max", "bigger than max"),
    }[bound]
    return make_error(
        kind,
        f"Value {value} {words} of {info.options[bound]}",
        name,
        input_name=name,
        input_config=input_config(info),
        received_value=strict_json(value),
    )


def not_in_list(name: str, info: InputInfo, value: Any, options: Sequence[Any]) -> Error:
    if len(options) > LONGEST_OPTION_LIST:
        shown, config = f"(list of length {len(options)})", None
    else:
        shown, config = str(list(options)), input_config(info)
    return make_error(
        "value_not_in_list",
        "Value not in list",
        f"{name}: '{printable(value)}' not in {shown}",
        input_name=name,
        input_config=config,
        received_value=strict_json(value),
    )


def custom_check_failed(name: str, text: str | None) -> Error:
    return make_error(
        "custom_validation_failed",
        "Custom validation failed for node",
        name if text is None else f"{name} - {text}",
        input_name=name,
    )


def inputs_missing(node_id: str, found: str) -> Error:
    return make_error(
        "node_inputs_missing",
        "Node has no inputs object",
        f"node '{node_id}' needs an object 'inputs' (empty if there are none), found {found}",
    )


def exception_raised(error: BaseException) -> Error:
    """A node class failed while it was asked about the prompt."""
    return make_error(
        "exception_during_validation",
        "Exception when validating node",
        str(error),
        exception_type=full_type_name(type(error)),
        traceback=traceback.format_tb(error.__traceback__),
    )


def dependency_cycle(node_id: str, cycle: list[str], classes: dict[str, str]) -> Error:
    """Every node of a cycle gets this; long cycles are shown in part."""
    shown = cycle[:MOST_CYCLE_NODES]
    path = [f"{name} ({classes.get(name, '?')})" for name in cycle[:10]]
    path += ["..."] if len(cycle) > 10 else path[:1]
    return make_error(
        "dependency_cycle",
        "Dependency cycle detected",
        f"{' -> '.join(path)}: {len(cycle)} nodes need each other; remove one of the links",
        node_id=node_id,
        cycle_nodes=shown,
        cycle_length=len(cycle),
    )
