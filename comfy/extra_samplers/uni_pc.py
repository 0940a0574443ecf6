"""UniPC, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.public import write_through
from comfy.sampling.solvers.uni_pc import sample_unipc, sample_unipc_bh2

write_through(__name__)
