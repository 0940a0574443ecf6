"""Solvers: how the latent moves from one noise level to the next.

`SOLVERS` is the table behind the sampler menus. A solver is a function
``(model, x, sigmas, extra_args, callback, disable, **options) -> latent``; a row adds fixed options
and how the known region of a masked run is noised. Custom nodes add a solver by setting a function
``sample_<name>`` on the public module ``comfy.k_diffusion.sampling``; `find` looks there too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from comfy.sampling.solvers import (
    adams,
    dpm_solver,
    dpmpp,
    dpmpp_sde,
    er_sde,
    euler,
    heun,
    res,
    sa_solver,
    seeds,
    uni_pc,
)

PUBLIC_MODULE = "comfy.k_diffusion.sampling"


@dataclass(frozen=True)
class Solver:
    """A row of the table.

    Attributes:
        function: The solver.
        options: Options it is always called with.
        inpaint_options: `random` noises the known region with a draw of its own.
    """

    function: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    inpaint_options: dict[str, Any] = field(default_factory=dict)


SOLVERS: dict[str, Solver] = {
    "euler": Solver(euler.sample_euler),
    "euler_cfg_pp": Solver(euler.sample_euler_cfg_pp),
    "euler_ancestral": Solver(euler.sample_euler_ancestral),
    "euler_ancestral_cfg_pp": Solver(euler.sample_euler_ancestral_cfg_pp),
    "heun": Solver(heun.sample_heun),
    "heunpp2": Solver(heun.sample_heunpp2),
    "exp_heun_2_x0": Solver(seeds.sample_exp_heun_2_x0),
    "exp_heun_2_x0_sde": Solver(seeds.sample_exp_heun_2_x0_sde),
    "dpm_2": Solver(heun.sample_dpm_2),
    "dpm_2_ancestral": Solver(heun.sample_dpm_2_ancestral),
    "lms": Solver(adams.sample_lms),
    "dpm_fast": Solver(dpm_solver.dpm_fast_over_levels),
    "dpm_adaptive": Solver(dpm_solver.dpm_adaptive_over_levels),
    "dpmpp_2s_ancestral": Solver(dpmpp.sample_dpmpp_2s_ancestral),
    "dpmpp_2s_ancestral_cfg_pp": Solver(dpmpp.sample_dpmpp_2s_ancestral_cfg_pp),
    "dpmpp_sde": Solver(dpmpp_sde.sample_dpmpp_sde),
    "dpmpp_sde_gpu": Solver(dpmpp_sde.sample_dpmpp_sde_gpu),
    "dpmpp_2m": Solver(dpmpp.sample_dpmpp_2m),
    "dpmpp_2m_cfg_pp": Solver(dpmpp.sample_dpmpp_2m_cfg_pp),
    "dpmpp_2m_sde": Solver(dpmpp_sde.sample_dpmpp_2m_sde),
    "dpmpp_2m_sde_gpu": Solver(dpmpp_sde.sample_dpmpp_2m_sde_gpu),
    "dpmpp_2m_sde_heun": Solver(dpmpp_sde.sample_dpmpp_2m_sde_heun),
    "dpmpp_2m_sde_heun_gpu": Solver(dpmpp_sde.sample_dpmpp_2m_sde_heun_gpu),
    "dpmpp_3m_sde": Solver(dpmpp_sde.sample_dpmpp_3m_sde),
    "dpmpp_3m_sde_gpu": Solver(dpmpp_sde.sample_dpmpp_3m_sde_gpu),
    "ddpm": Solver(euler.sample_ddpm),
    "lcm": Solver(euler.sample_lcm),
    "ipndm": Solver(adams.sample_ipndm),
    "ipndm_v": Solver(adams.sample_ipndm_v),
    "deis": Solver(adams.sample_deis),
    "res_multistep": Solver(res.sample_res_multistep),
    "res_multistep_cfg_pp": Solver(res.sample_res_multistep_cfg_pp),
    "res_multistep_ancestral": Solver(res.sample_res_multistep_ancestral),
    "res_multistep_ancestral_cfg_pp": Solver(res.sample_res_multistep_ancestral_cfg_pp),
    "gradient_estimation": Solver(euler.sample_gradient_estimation),
    "gradient_estimation_cfg_pp": Solver(euler.sample_gradient_estimation_cfg_pp),
    "er_sde": Solver(er_sde.sample_er_sde),
    "seeds_2": Solver(seeds.sample_seeds_2),
    "seeds_3": Solver(seeds.sample_seeds_3),
    "sa_solver": Solver(sa_solver.sample_sa_solver),
    "sa_solver_pece": Solver(sa_solver.sample_sa_solver_pece),
    # With eta = 0 DDIM is Euler's method in sigma; only its masked runs differ.
    "ddim": Solver(euler.sample_euler, inpaint_options={"random": True}),
    "uni_pc": Solver(uni_pc.sample_unipc),
    "uni_pc_bh2": Solver(uni_pc.sample_unipc_bh2),
}
MENU_NAMES: tuple[str, ...] = tuple(SOLVERS)


def find(name: str) -> Solver:
    """Row of a sampler name, with the function as it is now: custom nodes may have replaced it.

    Raises:
        ValueError: no solver has the name.
    """
    row = SOLVERS.get(name)
    if row is not None:
        owner = sys.modules[row.function.__module__]
        current = getattr(owner, row.function.__name__, row.function)
        return Solver(current, row.options, row.inpaint_options)
    added = getattr(sys.modules.get(PUBLIC_MODULE), f"sample_{name}", None)
    if added is None:
        raise ValueError(f"unknown sampler {name!r}; known: {', '.join(SOLVERS)}")
    return Solver(added)
