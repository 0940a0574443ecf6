"""The same bits of a picture alone, in a batch and beside its negative text, on the CPU.

The math library reads its mode once in a process, so this runs in one of its own.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comfy.devices import reproducible

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import sys
import torch
from comfy.devices import runtime
from comfy.devices.policies import MemoryPolicy
runtime.install_runtime(runtime.build_runtime(MemoryPolicy(cpu=True)))
from comfy import ops
from comfy.ldm.autoencoder.kl import AutoencoderKL
from comfy.ldm.unet.model import UNetModel
from comfy.weights.layout import arrange_convolutions

torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
net = UNetModel(
    image_size=32, in_channels=4, out_channels=4, model_channels=64, num_res_blocks=[1, 1, 1],
    channel_mult=[1, 2, 3], num_heads=8, use_spatial_transformer=True, transformer_depth=[0, 1, 1],
    transformer_depth_output=[0, 0, 1, 1, 1, 1], transformer_depth_middle=1, context_dim=96,
    dtype=torch.float32, device="cpu", operations=ops.disable_weight_init,
).eval().requires_grad_(False)
vae = AutoencoderKL(
    {"ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 4}, embed_dim=4
).eval().requires_grad_(False)
for parameter in [*net.parameters(), *vae.parameters()]:
    scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.1
    parameter.data = torch.randn(parameter.shape) * scale + (parameter.ndim == 1)
for module in (net, vae):
    arrange_convolutions(module, "cpu")  # as whoever loads a file does
with torch.inference_mode():
    for height, width, tokens in ((8, 8, 77), (16, 16, 77), (20, 12, 154), (36, 32, 5)):
        x, times = torch.randn(4, 4, height, width), torch.tensor([900.0, 500.0, 500.0, 3.0])
        context = torch.randn(4, tokens, 96)
        def apply(start, stop):
            part = slice(start, stop)
            return net(x[part], times[part], context=context[part], transformer_options={})
        alone = torch.cat([apply(item, item + 1) for item in range(4)])
        for batch in (2, 3, 4):
            together = apply(0, batch)
            assert together.isfinite().all()
            same = torch.equal(together, alone[:batch])
            assert same, (height, width, batch, (together - alone[:batch]).abs().max())
        for coded, values in ((vae.decode, x), (vae.encode, torch.randn(4, 3, 2 * height, 64))):
            together = coded(values)
            for item in range(4):
                assert torch.equal(together[item], coded(values[item : item + 1])[0]), coded
"""


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkl.is_available(),
    reason="the math library that has the mode is not in this torch",
)
@pytest.mark.parametrize("threads", [1, 2])
def test_an_item_has_the_same_bits_in_every_batch(threads: int) -> None:
    if "GenuineIntel" not in _processor():
        pytest.skip("the mode is for Intel processors")
    clean = {name: value for name, value in os.environ.items() if name != reproducible.VARIABLE}
    clean["OMP_WAIT_POLICY"] = "passive"  # threads that spin wait for those of other tests
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(threads)], cwd=REPOSITORY, env=clean,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    return facts.read_text(encoding="utf-8") if facts.exists() else platform.processor()


def test_what_the_environment_says_of_the_mode_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reproducible.VARIABLE, "COMPATIBLE")
    reproducible.ask_for_equal_products()
    assert os.environ[reproducible.VARIABLE] == "COMPATIBLE"
    monkeypatch.delenv(reproducible.VARIABLE)
    reproducible.ask_for_equal_products()
    assert os.environ[reproducible.VARIABLE] == reproducible.MODE
