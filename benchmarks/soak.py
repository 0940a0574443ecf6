"""Does a busy server stay as small as it was? Thousands of small prompts, memory watched.

    python benchmarks/soak.py                          2,000 prompts under the default cache policy
    python benchmarks/soak.py --prompts 500 --cache-lru 100

Everything after `--prompts N` goes to the server's command line. The prompts are a mix: pictures
saved and previewed, cached reruns, loops by expansion, naps that overlap, failures, cancellations,
and the demo model at a few steps; a client follows them on a socket that it renews now and then.
Memory of the serving process is sampled after every 50 prompts. Growth is the mean of the last
tenth of the samples over the mean of those taken right after the warm-up. Target: within 5 %.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from comfy_execution.graph_utils import GraphBuilder
from tests.blackbox.client import Client, fresh, graph
from tests.blackbox.test_expansion import for_loop
from tests.support.prompts import demo_prompt
from tests.support.server_process import ServerProcess, running_server

WARM_UP = 0.25  # share of the prompts: every kind has run, allocators have their working set
EVERY = 50
GOAL_PERCENT = 5.0
MIB = 1024 * 1024

Prompt = GraphBuilder | dict


def picture(saved: bool) -> GraphBuilder:
    """A picture of varying size, saved or previewed."""
    g = graph()
    width, height = random.choice((64, 128, 256)), random.choice((64, 128))
    made = g.node("TrialPicture", shade="noise", width=width, height=height, count=1, tag=fresh())
    if saved:
        g.node("SaveImage", images=made.out(0), filename_prefix="soak")
    else:
        g.node("PreviewImage", images=made.out(0))
    return g


def again() -> GraphBuilder:
    """One of a few prompts that come back all the time."""
    g = graph()
    total = g.node("TrialAdd", a=random.randrange(3), b=1)
    g.node("TrialShow", value=total.out(0))
    return g


def naps() -> GraphBuilder:
    """Async nodes side by side, in an expansion."""
    g = graph()
    g.node("TrialShow", value=g.node("TrialNapGroup", value=5, seconds=fresh() * 1e-6).out(0))
    return g


def failure() -> GraphBuilder:
    """A node that raises, with a picture in its frames."""
    g = graph()
    made = g.node("TrialPicture", shade="noise", width=256, height=256, count=4, tag=fresh())
    kind = random.choice(("ValueError", "SystemExit", "RecursionError", "MemoryError"))
    joined = g.node("TrialJoin", values=made.out(0), separator=",")
    g.node("TrialShow", value=joined.out(0))
    g.node("TrialShow", value=g.node("TrialRaise", value=fresh(), kind=kind).out(0))
    return g


def progress() -> GraphBuilder:
    """Previews, as a sampler sends them."""
    g = graph()
    steps = g.node("TrialSteps", value=fresh(), steps=20, picture=True)
    g.node("TrialShow", value=steps.out(0))
    return g


def sampling() -> dict:
    """The demo model, a few steps, with texts and seeds that vary."""
    size = random.choice(((64, 64), (128, 128)))
    text = random.choice(("a red circle", "a blue square", "a green triangle"))
    return demo_prompt(text, size=size, seed=fresh(), steps=random.choice((2, 3)), prefix="soak")


def long_work() -> GraphBuilder:
    """To be cancelled."""
    g = graph()
    g.node("TrialShow", value=g.node("TrialPolite", value=fresh(), seconds=60.0).out(0))
    return g


MIX: dict[Callable[[], Prompt], int] = {
    lambda: picture(saved=True): 20,
    lambda: picture(saved=False): 20,
    again: 20,
    lambda: for_loop(random.randrange(1, 8), fresh()): 10,
    naps: 8,
    progress: 6,
    failure: 5,
    sampling: 10,
    long_work: 1,
}
"""Prompts and how often they come, in percent."""


@dataclass(frozen=True)
class Sample:
    """The serving process after so many prompts."""

    prompts: int
    rss_mib: float
    threads: int
    files: int


def measure(server: ServerProcess, prompts: int) -> Sample:
    """Looks at the process that serves, the child of the supervisor."""
    child = psutil.Process(server.process.pid).children()[0]
    rss = child.memory_info().rss / MIB
    return Sample(prompts, rss, child.num_threads(), child.num_fds())


def run_one(client: Client, make: Callable[[], Prompt]) -> None:
    """Runs a prompt to its end; long work is cancelled once it has begun."""
    if make is not long_work:
        client.run(make())
        return
    prompt_id = client.queue(make())
    client.wait_for("executing", prompt_id=prompt_id)
    client.server.post("/interrupt", {"prompt_id": prompt_id})
    client.follow(prompt_id)


def soak(server: ServerProcess, count: int) -> list[Sample]:
    """Runs the mix; returns a sample for every so many prompts."""
    random.seed(1)
    kinds, weights = list(MIX), list(MIX.values())
    samples: list[Sample] = []
    client = Client(server)
    begin = time.monotonic()
    for number in range(1, count + 1):
        run_one(client, random.choices(kinds, weights)[0])
        if number % EVERY:
            continue
        sample = measure(server, number)
        samples.append(sample)
        client.close()
        client = Client(server)
        print(
            f"{number:6} prompts  {sample.rss_mib:8.1f} MiB  {sample.threads:3} threads  "
            f"{sample.files:3} files  {number / (time.monotonic() - begin):5.1f} prompts/s",
            flush=True,
        )
    client.close()
    return samples


def growth_percent(samples: list[Sample]) -> float:
    """Mean of the last tenth over the mean of as many samples after the warm-up."""
    warm = [sample.rss_mib for sample in samples[int(len(samples) * WARM_UP) :]]
    part = max(1, len(samples) // 10)
    first, last = statistics.mean(warm[:part]), statistics.mean(warm[-part:])
    return (last / first - 1) * 100


def main() -> int:
    """Runs the soak; status 1 when memory grew by more than the goal allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=2000)
    options, rest = parser.parse_known_args()
    pack = REPOSITORY / "tests" / "blackbox" / "extra_model_paths.yaml"
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(
            Path(folder), "--cpu", "--extra-model-paths-config", str(pack), *rest
        ) as server,
    ):
        samples = soak(server, options.prompts)
    grown = growth_percent(samples)
    print(f"growth after the warm-up: {grown:+.2f} % (goal: within {GOAL_PERCENT:.0f} %)")
    return 1 if grown > GOAL_PERCENT else 0


if __name__ == "__main__":
    sys.exit(main())
