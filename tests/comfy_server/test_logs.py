"""What the terminal shows and the capture keeps when lines and progress bars meet."""

from __future__ import annotations

import io
import logging

import pytest
from tqdm import tqdm

from app.logger import get_logs
from comfy_server import LogCapture, ServerOptions
from tests.comfy_server.conftest import make_server


@pytest.mark.parametrize(
    ("writes", "shown"),
    [
        (["a\n", "b\n"], "a\nb\n"),
        (["\r 10%", "line\n"], "\r 10%\nline\n"),
        (["\r 10%", "line\n", "\r 20%", "other\n"], "\r 10%\nline\n\r 20%\nother\n"),
        (["\r 10%", "line\n", "next\n"], "\r 10%\nline\nnext\n"),
        (["\r 10%", "\r 20%", "\n", "line\n"], "\r 10%\r 20%\nline\n"),
        (["\r100%\n", "line\n"], "\r100%\nline\n"),
        (["\r 10%", "", "line\n"], "\r 10%\nline\n"),
        (["\r 10%", "\x1b[A", "\r"], "\r 10%\x1b[A\r"),
        (["\r     ", "\r", "line\n"], "\r     \rline\n"),
        (["question? ", "answer\n"], "question? answer\n"),
        (["\r 10%", "part", " of a line\n"], "\r 10%part of a line\n"),
    ],
)
def test_a_line_begins_behind_a_progress_bar_on_a_line_of_its_own(
    writes: list[str], shown: str
) -> None:
    terminal, capture = io.StringIO(), LogCapture()
    stream = capture.wrap(terminal)
    for text in writes:
        stream.write(text)
    assert terminal.getvalue() == shown
    assert ("line\n" in shown) == any("line\n" in entry["m"] for entry in capture.entries())


def test_log_lines_between_the_steps_of_a_bar_stand_alone() -> None:
    terminal = io.StringIO()
    stream = LogCapture().wrap(terminal)
    log = logging.Logger("bar")
    log.addHandler(logging.StreamHandler(stream))
    with tqdm(total=3, file=stream, mininterval=0) as bar:
        for number in range(3):
            bar.update()
            log.info("request %d", number)
    lines = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
    assert [line for line in lines if "request" in line] == [f"request {n}" for n in range(3)]
    assert "100%" in lines[-2]


async def test_packs_read_the_last_lines(options: ServerOptions) -> None:
    server = make_server(options)
    server.logs.wrap(io.StringIO()).write("a line\n")
    assert [entry["m"] for entry in get_logs()] == ["a line\n"]
