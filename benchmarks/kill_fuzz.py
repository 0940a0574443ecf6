"""Does kill -9 lose anything? A server under load is killed at random moments, again and again.

    python benchmarks/kill_fuzz.py --rounds 20 [--seed 1]

Clients post short prompts without pause, each with an id of its own, and note what was answered
with 200; a reader notes what the history showed. In every round the serving process alone (its
supervisor starts it again) or the whole process group (the harness does) is killed after a random
time. In the end everything that was accepted must be in the history, exactly once, with its client
id; nothing that was seen there may have changed; no prompt may have been started more than twice;
and each client's prompts must have started in the order in which they were posted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.support.server_process import ServerProcess, start_server

CLIENTS = 4
MOST_WAITING = 40  # a client pauses while so many of its prompts wait
DRAIN_S = 120.0


@dataclass
class Seen:
    """What the clients know.

    Attributes:
        accepted: Ids answered with 200, by client, in order.
        finished: Id -> status text of what the history showed.
    """

    accepted: dict[str, list[str]] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)


class Siege:
    """A server in a folder, clients that never rest, and what they have seen."""

    def __init__(self, base: Path, seed: int) -> None:
        self.base = base
        self.chance = random.Random(seed)
        self.seen = Seen({f"client-{index}": [] for index in range(CLIENTS)})
        self.marks = base / "marks"
        self.server: ServerProcess = start_server(base, *self.arguments)
        self.port = self.server.port
        self.rests = threading.Event()

    @property
    def arguments(self) -> list[str]:
        packs = str(REPOSITORY / "tests/blackbox/extra_model_paths.yaml")
        return ["--cpu", "--extra-model-paths-config", packs]

    def prompt(self, value: str) -> dict[str, Any]:
        """Leaves a mark when it starts, works a while, shows its value."""
        seconds = random.choice((0.0, 0.0, 0.01, 0.05))
        mark = {"value": int(value, 16), "path": str(self.marks), "seconds": seconds}
        return {
            "1": {"class_type": "TrialMark", "inputs": mark},
            "2": {"class_type": "TrialShow", "inputs": {"value": ["1", 0]}},
        }

    def post_for_ever(self, client_id: str) -> None:
        """Posts one prompt after the other; one whose connection breaks may or may not be in."""
        while not self.rests.is_set():
            mine = self.seen.accepted[client_id]
            if len(mine) - sum(name in self.seen.finished for name in mine) > MOST_WAITING:
                time.sleep(0.01)
                continue
            value = f"{random.getrandbits(40):010x}"
            body = {"prompt": self.prompt(value), "client_id": client_id, "prompt_id": f"p-{value}"}
            status, answer = self.ask("POST", "/prompt", body)
            if status == 200:
                assert answer["prompt_id"] == f"p-{value}", answer
                mine.append(f"p-{value}")
            else:
                time.sleep(0.02)

    def read_for_ever(self) -> None:
        """Notes what the history shows; what it showed once must stay."""
        while not self.rests.is_set():
            _, entries = self.ask("GET", "/history?max_items=60")
            for name, entry in (entries or {}).items():
                self.note(name, entry)
            time.sleep(0.02)

    def note(self, name: str, entry: dict[str, Any]) -> None:
        text = json.dumps([entry["status"], entry["outputs"]], sort_keys=True)
        before = self.seen.finished.setdefault(name, text)
        assert before == text, f"the history of {name} has changed:\n{before}\n{text}"

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON; (0, None) while nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, None
        finally:
            connection.close()

    def kill(self) -> str:
        """Kills the serving process, or everything and starts it anew."""
        time.sleep(self.chance.uniform(0.05, 1.5))
        if self.chance.random() < 0.7:
            children = psutil.Process(self.server.process.pid).children()
            for child in children:
                os.kill(child.pid, signal.SIGKILL)
            what = "child"
        else:
            self.server.kill()
            self.server = start_server(self.base, *self.arguments, port=self.port)
            what = "group"
        deadline = time.monotonic() + 60
        while self.ask("GET", "/prompt")[0] != 200:
            assert time.monotonic() < deadline, "the server does not come back"
            time.sleep(0.05)
        return what

    def drain(self) -> None:
        """Waits until nothing waits or runs."""
        deadline = time.monotonic() + DRAIN_S
        while True:
            status, answer = self.ask("GET", "/prompt")
            if status == 200 and answer["exec_info"]["queue_remaining"] == 0:
                return
            assert time.monotonic() < deadline, "the queue does not drain"
            time.sleep(0.05)

    def verdict(self) -> dict[str, int]:
        """Checks everything; returns figures.

        Raises:
            AssertionError: something was lost, changed, repeated or out of order.
        """
        _, history = self.ask("GET", "/history")
        for name, entry in history.items():
            self.note(name, entry)
        lost = [n for names in self.seen.accepted.values() for n in names if n not in history]
        assert not lost, f"accepted and lost: {lost}"
        gone = [name for name in self.seen.finished if name not in history]
        assert not gone, f"seen in the history and gone: {gone}"
        marks = self.marks.read_text().split()
        starts = Counter(marks)
        often = {value: count for value, count in starts.items() if count > 2}
        assert not often, f"started more than twice: {often}"
        crashed = 0
        for client_id, names in self.seen.accepted.items():
            for name in names:
                assert history[name]["prompt"][3]["client_id"] == client_id, name
                crashed += history[name]["status"]["status_str"] != "success"
            values = [str(int(name[2:], 16)) for name in names]
            first = [marks.index(value) for value in values if value in starts]
            assert first == sorted(first), f"the prompts of {client_id} were not run in order"
        accepted = sum(map(len, self.seen.accepted.values()))
        twice = sum(count == 2 for count in starts.values())
        return {"accepted": accepted, "started twice": twice, "given up": crashed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="latentloom-siege-") as folder:
        siege = Siege(Path(folder), options.seed)
        threads = [
            threading.Thread(target=siege.post_for_ever, args=(client_id,))
            for client_id in siege.seen.accepted
        ]
        threads.append(threading.Thread(target=siege.read_for_ever))
        for thread in threads:
            thread.start()
        try:
            kinds = Counter(siege.kill() for _ in range(options.rounds))
        finally:
            siege.rests.set()
            for thread in threads:
                thread.join()
        siege.drain()
        figures = siege.verdict()
        siege.server.stop()
    print(f"killed {dict(kinds)}; {figures}; nothing lost, changed, repeated or out of order")


if __name__ == "__main__":
    main()
