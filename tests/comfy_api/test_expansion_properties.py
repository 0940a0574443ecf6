"""For any tree of dynamic inputs, every name of a fitting prompt has its place."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from comfy_api.latest import io

NAMES = st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True)


@st.composite
def trees(draw: st.DrawFn, name: str, depth: int) -> tuple[Any, dict[str, Any]]:
    """An input, and dotted names with values of a prompt that fits it."""
    kind = draw(st.sampled_from(["plain", "grow", "combo", "slot"] if depth else ["plain"]))
    if kind == "plain":
        return io.Int.Input(name), {name: draw(st.integers())}
    if kind == "grow":
        count = draw(st.integers(0, 3))
        template = io.Autogrow.TemplatePrefix(io.Int.Input("n"), "n", min=0, max=3)
        live = {f"{name}.n{index}": draw(st.integers()) for index in range(count)}
        return io.Autogrow.Input(name, template), live
    # inputs below a choice or slot must not have its own id; such schemas are refused
    below = [draw(trees(inner, depth - 1)) for inner in draw(NAMES) if inner != name]
    inputs = [declared for declared, _ in below]
    live = {f"{name}.{dotted}": value for _, one in below for dotted, value in one.items()}
    if kind == "slot":
        return io.DynamicSlot.Input(io.Mask.Input(name), inputs), {name: 0, **live}
    options = [io.DynamicCombo.Option("chosen", inputs), io.DynamicCombo.Option("other", [])]
    return io.DynamicCombo.Input(name, options), {name: "chosen", **live}


def leaves(tree: Any) -> list[Any]:
    """Values at the ends of nested dictionaries."""
    if not isinstance(tree, dict):
        return [tree]
    return [leaf for value in tree.values() for leaf in leaves(value)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_input_of_a_prompt_is_declared_and_nested_once(data: st.DataObject) -> None:
    made = [data.draw(trees(name, 3)) for name in ("x", "y")]
    live = {dotted: value for _, one in made for dotted, value in one.items()}
    schema = io.Schema("N", inputs=[declared for declared, _ in made])
    schema.validate()
    expansion = schema.expand(live)
    declared = [name for section in expansion.sections.values() for name in section]
    assert sorted(declared) == sorted(live)
    nested = expansion.nest({name: index for index, name in enumerate(live)})
    assert sorted(leaves(nested)) == list(range(len(live)))
    assert set(nested) == {"x", "y"}
