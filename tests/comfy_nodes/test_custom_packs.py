"""Packs are found and loaded; one that fails in whatever way never takes the others down."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import folder_paths
from comfy_nodes import custom_packs

NODE = """
class Node:
    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "test"
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}
    def run(self):
        return ()
"""


@pytest.fixture
def packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty `custom_nodes` folder."""
    monkeypatch.setitem(
        folder_paths.folder_names_and_paths, "custom_nodes", ([str(tmp_path)], set())
    )
    for registry in (
        custom_packs.EXTENSION_WEB_DIRS,
        custom_packs.LOADED_MODULE_DIRS,
        custom_packs.IMPORT_FAILED,
    ):
        monkeypatch.setattr(custom_packs, _name_of(registry), {})
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path).replace(".", "_x_") in name:
            del sys.modules[name]


def _name_of(registry: dict[str, str]) -> str:
    return next(name for name, value in vars(custom_packs).items() if value is registry)


def write(folder: Path, name: str, text: str, file: str = "__init__.py") -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / file).write_text(text, encoding="utf-8")


class Table:
    """Collects what packs offer."""

    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}
        self.titles: dict[str, str] = {}

    def add(self, nodes: Any, titles: Any) -> None:
        self.nodes.update(nodes)
        self.titles.update(titles)


def load(taken: tuple[str, ...] = (), **selection: Any) -> tuple[Table, list[str]]:
    table = Table()
    failed = asyncio.run(
        custom_packs.init_external_custom_nodes(
            table.add, taken, custom_packs.PackSelection(**selection)
        )
    )
    return table, failed


def test_a_folder_and_a_single_file_are_packs(packs: Path) -> None:
    offer = (
        NODE + 'NODE_CLASS_MAPPINGS = {"%s": Node}\nNODE_DISPLAY_NAME_MAPPINGS = {"%s": "Title"}\n'
    )
    write(packs, "folder.pack", offer % ("In Folder", "In Folder"))
    (packs / "single.py").write_text(offer % ("single", "single"), encoding="utf-8")
    table, failed = load()
    assert not failed
    assert table.titles == {"In Folder": "Title", "single": "Title"}
    modules = {key: node.RELATIVE_PYTHON_MODULE for key, node in table.nodes.items()}
    assert modules == {"In Folder": "custom_nodes.folder.pack", "single": "custom_nodes.single"}
    assert custom_packs.LOADED_MODULE_DIRS["folder.pack"] == str(packs / "folder.pack")


def test_disabled_hidden_and_cache_folders_are_left_alone(packs: Path) -> None:
    for name in ("pack.disabled", "__pycache__", ".git"):
        write(packs, name, "raise RuntimeError('must not be imported')")
    assert custom_packs.pack_paths() == []


def test_relative_imports_inside_a_pack_work(packs: Path) -> None:
    write(packs, "pack", "from .inner import NODE_CLASS_MAPPINGS\n")
    write(packs, "pack", NODE + 'NODE_CLASS_MAPPINGS = {"inner": Node}\n', "inner.py")
    table, failed = load()
    assert list(table.nodes) == ["inner"]
    assert not failed


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('broken')",
        "import a_module_that_does_not_exist",
        "def broken(:",
        "import sys; sys.exit(3)",
        "exit()",
        "raise BaseException('worse')",
    ],
)
def test_a_failing_pack_is_skipped_and_named(
    packs: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(packs, "a_broken", text)
    write(packs, "b_good", NODE + 'NODE_CLASS_MAPPINGS = {"good": Node}\n')
    table, failed = load()
    assert list(table.nodes) == ["good"]
    assert failed == [str(packs / "a_broken")]
    assert "a_broken" in caplog.text
    assert "Traceback" in custom_packs.IMPORT_FAILED[str(packs / "a_broken")]


@pytest.mark.parametrize(
    ("text", "kept", "named"),
    [
        ('NODE_CLASS_MAPPINGS = {"lost": None, "good": Node}', ["good"], "'lost'"),
        ('NODE_CLASS_MAPPINGS = {7: Node, "good": Node}', ["good"], "7"),
        ('NODE_CLASS_MAPPINGS = {"text": "Node", "good": Node}', ["good"], "'text'"),
        ('NODE_CLASS_MAPPINGS = {"bare": object, "good": Node}', ["good"], "'bare'"),
        ("NODE_CLASS_MAPPINGS = [Node]", [], "NODE_CLASS_MAPPINGS"),
        (
            'NODE_CLASS_MAPPINGS = {"good": Node}; NODE_DISPLAY_NAME_MAPPINGS = ["Good"]',
            ["good"],
            "NODE_DISPLAY_NAME_MAPPINGS",
        ),
        ('NODE_CLASS_MAPPINGS = {"good": Node}; WEB_DIRECTORY = 12', ["good"], "WEB_DIRECTORY"),
    ],
)
def test_what_is_no_node_is_named_and_left_out(
    packs: Path, text: str, kept: list[str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(packs, "a_odd", f"{NODE}\n{text}\n")
    write(packs, "b_good", NODE + 'NODE_CLASS_MAPPINGS = {"next": Node}\n')
    table, failed = load()
    assert list(table.nodes) == [*kept, "next"]
    assert failed == ([] if kept else [str(packs / "a_odd")])
    assert named in caplog.text
    assert "a_odd" in caplog.text


def test_a_pack_that_loads_for_long_is_named_meanwhile(
    packs: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_packs, "SLOW_S", 0.2)
    waits = "import time\nend = time.monotonic() + 0.6\nwhile time.monotonic() < end: pass\n"
    write(packs, "a_slow", f"{waits}{NODE}NODE_CLASS_MAPPINGS = {{'slow': Node}}\n")
    write(packs, "a_slow", waits, "prestartup_script.py")
    write(packs, "b_quick", NODE + "NODE_CLASS_MAPPINGS = {'quick': Node}\n")
    custom_packs.run_prestartup_scripts()
    load()
    said = [line for line in caplog.messages if "has been loading for" in line]
    said = [line for line in said if "b_quick" not in line]  # nothing is quick on a busy machine
    assert len(said) == 2
    assert str(packs / "a_slow" / "prestartup_script.py") in said[0]
    assert said[1].startswith(f"{packs / 'a_slow'} has")


def test_titles_that_are_no_text_are_left_out(packs: Path) -> None:
    titles = 'NODE_DISPLAY_NAME_MAPPINGS = {"a": None, "b": "B", "c": 3}'
    nodes = 'NODE_CLASS_MAPPINGS = {"a": Node, "b": Node, "c": Node}'
    write(packs, "pack", f"{NODE}\n{nodes}\n{titles}\n")
    table, _ = load()
    assert table.titles == {"b": "B"}
    assert list(table.nodes) == ["a", "b", "c"]


def test_a_folder_without_python_is_reported(packs: Path) -> None:
    (packs / "notes").mkdir()
    _, failed = load()
    assert failed == [str(packs / "notes")]


def test_a_pack_cannot_replace_a_built_in_node_but_may_replace_another_packs(packs: Path) -> None:
    write(packs, "a", NODE + 'NODE_CLASS_MAPPINGS = {"KSampler": Node, "shared": Node}\n')
    write(packs, "b", NODE + 'NODE_CLASS_MAPPINGS = {"shared": Node}\n')
    table, _ = load(taken=("KSampler",))
    assert list(table.nodes) == ["shared"]
    assert table.nodes["shared"].RELATIVE_PYTHON_MODULE == "custom_nodes.b"


def test_a_pack_with_browser_files_only_counts_as_loaded(packs: Path) -> None:
    write(packs, "web_only", 'WEB_DIRECTORY = "./js"\n')
    (packs / "web_only" / "js").mkdir()
    _, failed = load()
    assert not failed
    expected = {"web_only": str(packs / "web_only" / "js")}
    assert expected == custom_packs.EXTENSION_WEB_DIRS


def test_a_project_file_may_name_the_web_folder(packs: Path) -> None:
    write(packs, "pack", "NODE_CLASS_MAPPINGS = {}\n")
    settings = '[project]\nname = "nice-name"\n[tool.comfy]\nweb = "browser"\n'
    write(packs, "pack", settings, "pyproject.toml")
    (packs / "pack" / "browser").mkdir()
    load()
    expected = {"nice-name": str(packs / "pack" / "browser")}
    assert expected == custom_packs.EXTENSION_WEB_DIRS


def test_an_entrypoint_gives_schema_nodes(packs: Path) -> None:
    text = """
class Schema:
    node_id, display_name = "V3Node", "A node"
class V3Node:
    @classmethod
    def GET_SCHEMA(cls):
        return Schema
class Extension:
    async def on_load(self):
        self.ready = True
    async def get_node_list(self):
        assert self.ready
        return [V3Node]
async def comfy_entrypoint():
    return Extension()
"""
    write(packs, "modern", text)
    table, failed = load()
    assert not failed
    assert list(table.nodes) == ["V3Node"]
    assert table.titles == {"V3Node": "A node"}


MIXED_PACK = """
from comfy_api.latest import ComfyExtension, io

class Good(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="Good", category="test", inputs=[], outputs=[])
    @classmethod
    def execute(cls):
        return io.NodeOutput()

class Twice(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        same = [io.Int.Input("a"), io.Int.Input("a")]
        return io.Schema(node_id="Twice", category="test", inputs=same, outputs=[])
    @classmethod
    def execute(cls, a):
        return io.NodeOutput()

class Raises(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        raise RuntimeError("no such file")
    @classmethod
    def execute(cls):
        return io.NodeOutput()

class Extension(ComfyExtension):
    async def get_node_list(self):
        return CHOSEN

async def comfy_entrypoint():
    return Extension()
"""


def test_a_wrong_schema_does_not_hide_its_siblings(
    packs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(packs, "mixed", MIXED_PACK.replace("CHOSEN", "[Twice, Good, Raises]"))
    table, failed = load()
    assert failed == []
    assert list(table.nodes) == ["Good"]
    assert "Twice" in caplog.text
    assert "no such file" in caplog.text


def test_a_pack_without_one_right_schema_has_failed(packs: Path) -> None:
    write(packs, "all_wrong", MIXED_PACK.replace("CHOSEN", "[Twice, Raises]"))
    table, failed = load()
    assert failed == [str(packs / "all_wrong")]
    assert not table.nodes
    reason = custom_packs.IMPORT_FAILED[failed[0]]
    assert "Twice" in reason
    assert "Raises: no such file" in reason


def test_disabling_packs_spares_those_that_are_allowed(packs: Path) -> None:
    for name in ("wanted", "unwanted"):
        write(packs, name, NODE + f'NODE_CLASS_MAPPINGS = {{"{name}": Node}}\n')
    table, _ = load(disabled=True, allowed=("wanted",))
    assert list(table.nodes) == ["wanted"]


def test_prestartup_scripts_run_and_may_fail(packs: Path) -> None:
    marker = packs / "ran"
    write(packs, "a", "import sys; sys.exit(1)", "prestartup_script.py")
    text = f"open({str(marker)!r}, 'w').close()"
    write(packs, "b", text, "prestartup_script.py")
    custom_packs.run_prestartup_scripts()
    assert marker.exists()


@pytest.mark.parametrize("has_list", [True, False])
def test_a_pack_that_lacks_a_package_is_told_how_to_get_it(
    packs: Path, caplog: pytest.LogCaptureFixture, has_list: bool
) -> None:
    write(packs, "needy", "import surely_not_installed.part")
    if has_list:
        write(packs, "needy", "surely-not-installed", "requirements.txt")
    load()
    listed = f'-r "{packs / "needy" / "requirements.txt"}"'
    command = f'"{sys.executable}" -m pip install {listed if has_list else "surely_not_installed"}'
    assert command in caplog.text


def test_a_missing_part_of_this_server_is_not_to_be_installed(
    packs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(packs, "ahead", "import comfy.surely_not_here")
    load()
    assert "comfy.surely_not_here" in caplog.text
    assert "pip install" not in caplog.text


def test_a_pack_that_the_selection_refuses_is_left_out(packs: Path) -> None:
    write(packs, "old-manager", f"{NODE}\nNODE_CLASS_MAPPINGS = {{'Old': Node}}")
    write(packs, "kept", f"{NODE}\nNODE_CLASS_MAPPINGS = {{'Kept': Node}}")
    table, _ = load(is_refused=lambda path: "manager" in Path(path).name)
    assert set(table.nodes) == {"Kept"}


def test_packs_find_the_public_modules_without_importing_each(packs: Path) -> None:
    """As `import comfy` and an attribute, and in `sys.modules`."""
    write(
        packs,
        "trusting",
        "import sys\nimport comfy, comfy_extras\n"
        "assert comfy.samplers.KSampler.SAMPLERS and comfy.sd.VAE and comfy.utils.ProgressBar\n"
        "assert comfy.ldm.modules.attention.optimized_attention\n"
        "assert comfy.k_diffusion.sampling.sample_euler\n"
        "assert comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel\n"
        "assert sys.modules['comfy.model_management'].get_torch_device\n"
        "assert sys.modules['server'].PromptServer and sys.modules['nodes'].MAX_RESOLUTION\n"
        f"{NODE}\nNODE_CLASS_MAPPINGS = {{'Trusting': Node}}",
    )
    script = (
        "import asyncio, folder_paths\n"
        f"folder_paths.folder_names_and_paths['custom_nodes'] = ([{str(packs)!r}], set())\n"
        "from comfy_nodes import lifecycle\n"
        "print(asyncio.run(lifecycle.init_external_custom_nodes()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
