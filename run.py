"""Two commands for a fresh machine: `python run.py serve` and `python run.py test`.

Both need nothing but Python. Each makes a virtual environment when there is none (`.venv`, or the
folder named by LATENTLOOM_VENV), installs the pinned dependencies into it, and then starts the
server with any further arguments, or runs every check. When neither `pyproject.toml` nor
`constraints.txt` has changed since, the set-up step is skipped.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = Path(os.environ.get("LATENTLOOM_VENV") or ROOT / ".venv").absolute()
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
OLDEST = (3, 10)
MOST_PROCESSES = 4  # of the tests; each takes a gigabyte or two
USAGE = """usage: python run.py serve [server options]   start the server (serve --help lists them)
       python run.py test [pytest options]    run every check: ruff, mypy, import-linter, pytest
"""


def fingerprint() -> str:
    """Hash of everything that decides what the environment must hold."""
    digest = hashlib.sha256(f"{sys.version} {ROOT}".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def prepare(extras: str) -> None:
    """Makes the environment hold the pinned dependencies, plus those of `extras` ("" or "dev")."""
    stamp = VENV / "latentloom-installed"
    wanted = fingerprint()
    held = stamp.read_text().split() if stamp.is_file() else []
    if PYTHON.is_file() and held[:1] == [wanted] and extras in {"", *held[1:]}:
        return
    make_environment()
    packages = f"{ROOT}[{extras}]" if extras else str(ROOT)
    print(
        "latentloom: installing the pinned dependencies (a few minutes the first time)", flush=True
    )
    command: list[str | Path] = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
        "--editable",
        packages,
    ]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        sys.exit(
            "latentloom: installation failed; the lines above say why. "
            "Run the same command again to retry."
        )
    compile_program()
    stamp.write_text(f"{wanted} {extras}".strip())


def make_environment() -> None:
    """Creates the environment, or mends one whose creation was broken off before it had pip."""
    if PYTHON.is_file():
        asking: list[str | Path] = [PYTHON, "-c", "import pip"]
        if subprocess.run(asking, check=False, capture_output=True).returncode == 0:
            return
    print(f"latentloom: creating {VENV}", flush=True)
    try:
        venv.create(VENV, with_pip=True, clear=(VENV / "pyvenv.cfg").is_file())
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"latentloom: {VENV} cannot be created: {error}. The folder must be writable and its "
            "disk have 8 GB of room; LATENTLOOM_VENV names another. Some systems keep venv in a "
            "package of its own (Debian: apt install python3-venv)."
        )


def compile_program() -> None:
    """Writes the program's bytecode, as pip does for what it copies but not for this checkout.

    Where PYTHONDONTWRITEBYTECODE is set, as in many containers, every start would else spend half
    a second on compiling. It only saves time: a checkout that cannot be written to works without.
    """
    skipped = "|".join(re.escape(str(path)) for path in (VENV, *ROOT.glob("custom_nodes")))
    command: list[str | Path] = [PYTHON, "-m", "compileall", "-qq", "-x", skipped, ROOT]
    subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.DEVNULL)


def serve(arguments: list[str]) -> int:
    """Starts main.py with `arguments`; replaces this process where the system allows it."""
    command = [str(PYTHON), str(ROOT / "main.py"), *arguments]
    if os.name == "posix":
        os.execv(command[0], command)
    return subprocess.run(command, check=False).returncode


def test(arguments: list[str]) -> int:
    """Runs every check, the later ones too when an earlier one fails; pytest comes last.

    The tests run in a process for each core, a file in one of them; `-n 0` runs them in one.
    """
    processes = str(min(os.cpu_count() or 1, MOST_PROCESSES))
    # Threads of several processes that wait for each other on the same cores are many times slower.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    module = [str(PYTHON), "-m"]
    checks = {
        "ruff check": [*module, "ruff", "check", "."],
        "ruff format": [*module, "ruff", "format", "--check", "--quiet", "."],
        "mypy": [*module, "mypy"],
        "import-linter": [str(PYTHON.with_name("lint-imports")), "--no-logo"],
        "pytest": [*module, "pytest", "-n", processes, "--dist", "loadfile", *arguments],
    }
    failed = []
    for name, command in checks.items():
        print(f"== {name}", flush=True)
        started = time.monotonic()
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0:
            failed.append(name)
        print(
            f"== {name}: {'FAILED' if name in failed else 'ok'}"
            f" in {time.monotonic() - started:.0f} s",
            flush=True,
        )
    if failed:
        print(f"latentloom: failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def main() -> int:
    """Runs the command named on the command line."""
    if sys.version_info < OLDEST:
        sys.exit(
            f"latentloom needs Python {OLDEST[0]}.{OLDEST[1]} or newer, "
            f"this is {sys.version.split()[0]}: {sys.executable}"
        )
    command, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command == "serve":
        prepare("")
        return serve(arguments)
    if command == "test":
        prepare("dev")
        return test(arguments)
    print(USAGE, end="")
    return 0 if command in {"-h", "--help"} else 2


if __name__ == "__main__":
    sys.exit(main())
