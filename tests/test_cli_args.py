"""Options: every one of the public list is accepted, in every form launchers use."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import main
from comfy import cli_args
from utils import policies, start_up


def parse(*argv: str) -> Any:
    return cli_args.build_parser().parse_args(argv)


def test_every_public_option_is_known_and_says_when_it_has_no_meaning(spec_folder: Path) -> None:
    parser = cli_args.build_parser()
    listed = set(re.findall(r"`(--[a-z][\w-]*)", (spec_folder / "cli.md").read_text()))
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    assert listed <= known.keys(), listed - known.keys()
    assert len(listed) > 100
    assert all(known[flag].help for flag in listed)
    inert = [flag for flag in known if cli_args.ineffective(parser, [flag])]
    assert all(cli_args.NO_EFFECT in str(known[flag].help) for flag in inert)


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ([], "listen", "127.0.0.1"),
        (["--listen"], "listen", "0.0.0.0,::"),
        (["--listen", "127.0.0.1,::1"], "listen", "127.0.0.1,::1"),
        (["--port=99"], "port", 99),
        (["--enable-cors-header"], "enable_cors_header", "*"),
        (["--enable-cors-header", "http://a"], "enable_cors_header", "http://a"),
        (["--cache-ram"], "cache_ram", 4.0),
        (["--cache-ram", "2.5"], "cache_ram", 2.5),
        (["--cache-ram", "2", "8"], "cache_ram", 2.0),
        (["--verbose"], "verbose", "DEBUG"),
        (["--verbose", "ERROR"], "verbose", "ERROR"),
        (["--verbose", "DEBUG", "x.log"], "verbose", "INFO"),
        (["--verbose", "ERROR", "--verbose", "DEBUG", "x"], "log_files", [("DEBUG", "x")]),
        (["--async-offload"], "async_offload", 2),
        (["--directml"], "directml", -1),
        (["--cuda-device", "0,1"], "cuda_device", "0,1"),
        (["--max-upload-size", "0.5"], "max_upload_size", 0.5),
        ([], "max_prompt_nodes", 50_000),
        (["--max-prompt-nodes", "7"], "max_prompt_nodes", 7),
        (["--offline"], "disable_api_nodes", True),
        (["--enable-compress"], "enable_compress_response_body", True),
    ],
    ids=str,
)
def test_values_in_every_form(argv: list[str], name: str, value: Any) -> None:
    assert getattr(parse(*argv), name) == value


@pytest.mark.parametrize(
    "argv",
    [["--nosuch"], ["--cache-ram", "1", "2", "3"], ["--verbose", "LOUD"], ["--highvram", "--cpu"],
     ["--verbose", "INFO", "a", "b"], ["--cache-none", "--cache-lru", "3"], ["--port", "x"]],
    ids=str,
)  # fmt: skip
def test_mistakes_end_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_feature_flags_are_added_and_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert policies.feature_flag("a") == ("a", True)
    assert policies.feature_flag("a=3") == ("a", 3)
    assert policies.feature_flag("a=b=c") == ("a", "b=c")
    before = vars(cli_args.args).copy()
    try:
        flags = ("--feature-flag", "mine=[1]", "--feature-flag", "supports_resume=false")
        assert main.main([*flags, "--list-feature-flags", "--front-end-root", str(tmp_path)]) == 0
    finally:
        vars(cli_args.args).update(before)
    listed = json.loads(capsys.readouterr().out)
    assert listed["mine"] == [1]
    assert listed["supports_resume"] is True


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "x"], "'x' is no port; expected 0 (any free one) to 65535"),
        (["--port", "65536"], "'65536' is no port"),
        (["--max-upload-size", "-1"], "'-1' is no amount; expected a number from 0 on"),
        (["--reserve-vram", "nan"], "'nan' is no amount"),
        (["--cache-ram", "-4"], "'-4' is no amount"),
        (["--cache-lru", "-4"], "'-4' is no whole number; expected 0 or more"),
        (["--preview-size", "1.5"], "'1.5' is no whole number"),
        (["--workers", "many"], "'many' is no number of workers; expected 0 or more"),
        (["--ray-workers", "-1"], "'-1' is no number of workers"),
        (["--preview-method", "zz"], "one of none, auto, latent2rgb, taesd, found 'zz'"),
        (["--fast", "autotune", "slow"], "cublas_ops, autotune, cpu_bf16, found 'slow'"),
    ],
    ids=str,
)
def test_mistakes_say_what_is_expected(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
    assert said in capsys.readouterr().err


def test_the_papers_formulas_are_computed_on_request_only() -> None:
    assert not policies.precision_policy(parse()).paper_formulas
    assert policies.precision_policy(parse("--paper-formulas")).paper_formulas


def test_disabled_nodes_are_read_from_a_list(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    for text in ("- A\n- B\n", "disabled_nodes:\n  - A\n  - B\n"):
        path.write_text(text)
        assert policies.disabled_nodes(str(path)) == ["A", "B"]
    path.write_text("just text")
    with pytest.raises(SystemExit, match="list of node names"):
        policies.disabled_nodes(str(path))


def test_a_log_file_gets_its_own_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    path = tmp_path / "debug.log"
    try:
        start_up.configure_logging(parse("--verbose", "ERROR", "--verbose", "DEBUG", str(path)))
        logging.getLogger("comfy.x").debug("a detail")
        logging.getLogger("comfy.x").error("a fault")
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:], root.level = kept, level
    assert path.read_text().splitlines() == ["a detail", "a fault"]
    assert "a detail" not in capsys.readouterr().err


def test_a_date_format_that_leads_elsewhere_ends_the_start_in_words() -> None:
    args = parse("--date-based-output", "--date-output-format", "../%Y")
    with pytest.raises(ValueError, match="date format"):
        start_up.configure_folders(args)
    assert parse().date_based_output is False
    assert cli_args.ineffective(cli_args.build_parser(), ["--date-based-output"]) == []
