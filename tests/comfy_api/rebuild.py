"""Turns recorded node listings back into schema objects, by the names authors use."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

SOCKETS = {
    kind.io_type: kind
    for kind in vars(io).values()
    if isinstance(kind, type)
    and issubclass(kind, io.ComfyTypeIO)
    and kind not in (io.MultiCombo, io.ComfyTypeIO)
}
SHARED = {"lazy": "lazy", "display_name": "display_name", "default": "default"}
WIDGETS = {
    "INT": {
        "min": "min",
        "max": "max",
        "step": "step",
        "display": "display_mode",
        "control_after_generate": "control_after_generate",
    },
    "FLOAT": {
        "min": "min",
        "max": "max",
        "step": "step",
        "round": "round",
        "display": "display_mode",
    },
    "STRING": {
        "multiline": "multiline",
        "dynamicPrompts": "dynamic_prompts",
        "forceInput": "force_input",
    },
    "BOOLEAN": {},
    "COMBO": {"options": "options"},
}


def socket_type(name: str) -> Any:
    """The class for a type name; a custom one if the interface has none of that name."""
    return SOCKETS.get(name) or io.Custom(name)


def template(recorded: dict[str, Any], known: dict[str, Any]) -> Any:
    """The match-type template of an input or output, one object for each id in a node."""
    name = recorded["template_id"]
    if name not in known:
        allowed = [socket_type(kind) for kind in recorded["allowed_types"].split(",")]
        known[name] = io.MatchType.Template(name, allowed if len(allowed) > 1 else allowed[0])
    return known[name]


def build_input(name: str, entry: list[Any], optional: bool, known: dict[str, Any]) -> Any:
    """One input from its recorded `[type, options]`."""
    kind, options = entry[0], dict(entry[1])
    extra = {"optional": optional}
    if kind == "COMFY_MATCHTYPE_V3":
        found = template(options["template"], known)
        return io.MatchType.Input(name, found, lazy=options.get("lazy"), **extra)
    if kind == "COMFY_AUTOGROW_V3":
        return io.Autogrow.Input(name, growth(options["template"], known), **extra)
    if kind == "COMFY_DYNAMICCOMBO_V3":
        rows = [
            io.DynamicCombo.Option(row["key"], build_inputs(row["inputs"], known))
            for row in options["options"]
        ]
        return io.DynamicCombo.Input(name, rows, **extra)
    if "," in kind:
        return io.MultiType.Input(name, [socket_type(part) for part in kind.split(",")], **extra)
    if kind == "COMBO":
        assert options.pop("multiselect") is False
        upload = [key for key in options if key.endswith("_upload")]
        for key in upload:
            assert options.pop(key) is True
            extra["upload"] = io.UploadType(key)
    names = SHARED | WIDGETS.get(kind, {})
    return socket_type(kind).Input(
        name, **extra, **{names[key]: value for key, value in options.items()}
    )


def growth(recorded: dict[str, Any], known: dict[str, Any]) -> Any:
    """The template of a growing list."""
    [item] = build_inputs(recorded["input"], known)
    if "names" in recorded:
        return io.Autogrow.TemplateNames(item, recorded["names"], recorded["min"])
    return io.Autogrow.TemplatePrefix(item, recorded["prefix"], recorded["min"], recorded["max"])


def build_inputs(sections: dict[str, Any], known: dict[str, Any]) -> list[Any]:
    """The inputs of the two visible sections."""
    return [
        build_input(name, entry, section == "optional", known)
        for section in ("required", "optional")
        for name, entry in sections.get(section, {}).items()
    ]


def build_outputs(info: dict[str, Any], known: dict[str, Any]) -> list[Any]:
    """The outputs, with match-type templates shared with the inputs."""
    matches = info["output_matchtypes"] or [None] * len(info["output"])
    outputs = []
    for kind, name, is_list, match in zip(
        info["output"], info["output_name"], info["output_is_list"], matches
    ):
        shown = {"display_name": None if name == kind else name, "is_output_list": is_list}
        if match is not None:
            outputs.append(io.MatchType.Output(known[match], **shown))
        else:
            outputs.append(socket_type(kind).Output(**shown))
    return outputs


def build_node(info: dict[str, Any]) -> type[io.ComfyNode]:
    """A node class whose schema says what a recorded listing says."""
    known: dict[str, Any] = {}
    inputs = build_inputs(info["input"], known)
    hidden = [io.Hidden[name] for name in info["input"].get("hidden", {})]
    automatic = (io.Hidden.prompt, io.Hidden.extra_pnginfo)
    schema = io.Schema(
        node_id=info["name"],
        display_name=info["display_name"],
        category=info["category"],
        inputs=inputs,
        outputs=build_outputs(info, known),
        hidden=[one for one in hidden if not (info["output_node"] and one in automatic)],
        is_output_node=info["output_node"],
        is_deprecated=info["deprecated"],
        is_experimental=info["experimental"],
    )

    class Rebuilt(io.ComfyNode):
        RELATIVE_PYTHON_MODULE = info["python_module"]

        @classmethod
        def define_schema(cls) -> io.Schema:
            return schema

    return Rebuilt
