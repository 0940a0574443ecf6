"""Solvers and their helpers, under the names custom nodes import, replace and add to."""
# ruff: noqa: F401

import torch  # custom nodes read and replace it here

from comfy.public import write_through
from comfy.sampling.noise import (
    BatchedBrownianTree,
    BrownianTreeNoiseSampler,
    default_noise_sampler,
)
from comfy.sampling.schedule_curves import (
    get_sigmas_laplace,
    get_sigmas_polyexponential,
    get_sigmas_vp,
)
from comfy.sampling.schedules import append_zero, get_sigmas_exponential, get_sigmas_karras
from comfy.sampling.solvers.adams import (
    linear_multistep_coeff,
    sample_deis,
    sample_ipndm,
    sample_ipndm_v,
    sample_lms,
)
from comfy.sampling.solvers.dpm_solver import (
    DPMSolver,
    sample_dpm_adaptive,
    sample_dpm_fast,
)
from comfy.sampling.solvers.dpmpp import (
    sample_dpmpp_2m,
    sample_dpmpp_2m_cfg_pp,
    sample_dpmpp_2s_ancestral,
    sample_dpmpp_2s_ancestral_cfg_pp,
)
from comfy.sampling.solvers.dpmpp_sde import (
    sample_dpmpp_2m_sde,
    sample_dpmpp_2m_sde_gpu,
    sample_dpmpp_2m_sde_heun,
    sample_dpmpp_2m_sde_heun_gpu,
    sample_dpmpp_3m_sde,
    sample_dpmpp_3m_sde_gpu,
    sample_dpmpp_sde,
    sample_dpmpp_sde_gpu,
)
from comfy.sampling.solvers.er_sde import sample_er_sde
from comfy.sampling.solvers.euler import (
    sample_ddpm,
    sample_euler,
    sample_euler_ancestral,
    sample_euler_ancestral_cfg_pp,
    sample_euler_cfg_pp,
    sample_gradient_estimation,
    sample_gradient_estimation_cfg_pp,
    sample_lcm,
)
from comfy.sampling.solvers.heun import (
    sample_dpm_2,
    sample_dpm_2_ancestral,
    sample_heun,
    sample_heunpp2,
)
from comfy.sampling.solvers.res import (
    sample_res_multistep,
    sample_res_multistep_ancestral,
    sample_res_multistep_ancestral_cfg_pp,
    sample_res_multistep_cfg_pp,
)
from comfy.sampling.solvers.sa_solver import sample_sa_solver, sample_sa_solver_pece
from comfy.sampling.solvers.seeds import (
    sample_exp_heun_2_x0,
    sample_exp_heun_2_x0_sde,
    sample_seeds_2,
    sample_seeds_3,
)
from comfy.sampling.solvers.step_size import PIDStepSizeController
from comfy.sampling.solvers.tensor_forms import (
    append_dims,
    ei_h_phi_1,
    ei_h_phi_2,
    get_ancestral_step,
    half_log_snr_to_sigma,
    offset_first_sigma_for_snr,
    sigma_to_half_log_snr,
    to_d,
)

write_through(__name__)
