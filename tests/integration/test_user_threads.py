"""A pack's threads on a server with accounts: they write where their user's node writes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.server_process import REPOSITORY, running_server

PACK = """
import os, threading
from concurrent.futures import ThreadPoolExecutor

import folder_paths

POOL = ThreadPoolExecutor(1)


class Threaded:
    INPUT_TYPES = classmethod(lambda cls: {"required": {"value": ("INT",)}})
    RETURN_TYPES, FUNCTION, OUTPUT_NODE = (), "run", True

    def write(self, name):
        folder = folder_paths.get_output_directory()
        os.makedirs(folder, exist_ok=True)
        open(os.path.join(folder, name), "w").close()

    def run(self, value):
        thread = threading.Thread(target=self.write, args=("thread",))
        thread.start()
        thread.join()
        POOL.submit(self.write, "pool").result()
        return {"ui": {"value": [value]}}


NODE_CLASS_MAPPINGS = {"Threaded": Threaded}
"""


def token_of(base: Path, user: str) -> str:
    command = [sys.executable, str(REPOSITORY / "main.py"), "--base-directory", str(base)]
    made = subprocess.run([*command, "--add-user", user], capture_output=True, text=True)
    found = re.search(r"\S{32,}", made.stdout)
    assert found is not None, made
    return found[0]


def test_threads_of_a_node_write_into_the_folder_of_its_user(tmp_path: Path) -> None:
    pack = tmp_path / "custom_nodes/threaded"
    pack.mkdir(parents=True)
    (pack / "__init__.py").write_text(PACK)
    tokens = {user: token_of(tmp_path, user) for user in ("ann", "bob")}
    prompt = {"1": {"class_type": "Threaded", "inputs": {"value": 1}}}
    with running_server(tmp_path, "--cpu", "--auth") as server:
        for token in tokens.values():
            headers = {"Authorization": f"Bearer {token}"}
            status, answer = server.post("/prompt?wait=true", {"prompt": prompt}, headers)
            assert status == 200, answer
    for user in tokens:
        assert {path.name for path in (tmp_path / "output" / user).iterdir()} >= {"thread", "pool"}
    assert not {"thread", "pool"} & {path.name for path in (tmp_path / "output").iterdir()}
