"""Nodes that choose a sampler and its options (SAMPLER)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from comfy.sampling import samplers
from comfy.sampling.solvers import er_sde, sa_solver
from comfy_api.latest import io
from comfy_extras.custom_sampling.levels import number

CATEGORY = "sampling/custom_sampling/samplers"
DEVICES = ["gpu", "cpu"]
GPU_NOISE = {"gpu": "_gpu", "cpu": ""}  # suffix of the solver that draws noise there


def chooser(node_id: str, inputs: Sequence[io.Input], title: str | None = None) -> io.Schema:
    """Declaration of a node that gives a sampler."""
    return io.Schema(
        node_id=node_id,
        display_name=title,
        category=CATEGORY,
        inputs=[*inputs],
        outputs=[io.Sampler.Output()],
    )


def eta() -> io.Float.Input:
    """Declaration of the share of noise that is renewed."""
    return number("eta", 1.0, 100.0)


def s_noise() -> io.Float.Input:
    """Declaration of the factor of the noise."""
    return number("s_noise", 1.0, 100.0)


def made(name: str, **options: Any) -> io.NodeOutput:
    """The sampler of a solver with options."""
    return io.NodeOutput(samplers.ksampler(name, options))


class KSamplerSelect(io.ComfyNode):
    """A sampler by name."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = io.Combo.Input("sampler_name", options=samplers.KSampler.SAMPLERS)
        return chooser("KSamplerSelect", [names])

    @classmethod
    def execute(cls, sampler_name: str) -> io.NodeOutput:
        return io.NodeOutput(samplers.sampler_object(sampler_name))

    get_sampler = execute


class SamplerDPMPP_3M_SDE(io.ComfyNode):
    """DPM-Solver++(3M) with noise."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        where = io.Combo.Input("noise_device", options=DEVICES)
        return chooser("SamplerDPMPP_3M_SDE", [eta(), s_noise(), where])

    @classmethod
    def execute(cls, eta: float, s_noise: float, noise_device: str) -> io.NodeOutput:
        return made(f"dpmpp_3m_sde{GPU_NOISE[noise_device]}", eta=eta, s_noise=s_noise)

    get_sampler = execute


class SamplerDPMPP_2M_SDE(io.ComfyNode):
    """DPM-Solver++(2M) with noise."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        kinds = io.Combo.Input("solver_type", options=["midpoint", "heun"])
        where = io.Combo.Input("noise_device", options=DEVICES)
        return chooser("SamplerDPMPP_2M_SDE", [kinds, eta(), s_noise(), where])

    @classmethod
    def execute(
        cls, solver_type: str, eta: float, s_noise: float, noise_device: str
    ) -> io.NodeOutput:
        name = f"dpmpp_2m_sde{GPU_NOISE[noise_device]}"
        return made(name, eta=eta, s_noise=s_noise, solver_type=solver_type)

    get_sampler = execute


class SamplerDPMPP_SDE(io.ComfyNode):
    """DPM-Solver++ of one step with noise."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        where = io.Combo.Input("noise_device", options=DEVICES)
        return chooser("SamplerDPMPP_SDE", [eta(), s_noise(), number("r", 0.5, 100.0), where])

    @classmethod
    def execute(cls, eta: float, s_noise: float, r: float, noise_device: str) -> io.NodeOutput:
        return made(f"dpmpp_sde{GPU_NOISE[noise_device]}", eta=eta, s_noise=s_noise, r=r)

    get_sampler = execute


class SamplerDPMPP_2S_Ancestral(io.ComfyNode):
    """DPM-Solver++(2S), ancestral."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return chooser("SamplerDPMPP_2S_Ancestral", [eta(), s_noise()])

    @classmethod
    def execute(cls, eta: float, s_noise: float) -> io.NodeOutput:
        return made("dpmpp_2s_ancestral", eta=eta, s_noise=s_noise)

    get_sampler = execute


class SamplerEulerAncestral(io.ComfyNode):
    """Euler, ancestral."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return chooser("SamplerEulerAncestral", [eta(), s_noise()])

    @classmethod
    def execute(cls, eta: float, s_noise: float) -> io.NodeOutput:
        return made("euler_ancestral", eta=eta, s_noise=s_noise)

    get_sampler = execute


class SamplerEulerAncestralCFGPP(io.ComfyNode):
    """Euler, ancestral, with CFG++."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [number("eta", 1.0, 1.0), number("s_noise", 1.0, 10.0)]
        title = "SamplerEulerAncestralCFG++"
        return chooser("SamplerEulerAncestralCFGPP", inputs, title)

    @classmethod
    def execute(cls, eta: float, s_noise: float) -> io.NodeOutput:
        return made("euler_ancestral_cfg_pp", eta=eta, s_noise=s_noise)

    get_sampler = execute


class SamplerLMS(io.ComfyNode):
    """Linear multistep."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return chooser("SamplerLMS", [io.Int.Input("order", default=4, min=1, max=100)])

    @classmethod
    def execute(cls, order: int) -> io.NodeOutput:
        return made("lms", order=order)

    get_sampler = execute


# Option -> usual value, in the order of the node.
ADAPTIVE_OPTIONS = {
    "rtol": 0.05,
    "atol": 0.0078,
    "h_init": 0.05,
    "pcoeff": 0.0,
    "icoeff": 1.0,
    "dcoeff": 0.0,
    "accept_safety": 0.81,
    "eta": 0.0,
    "s_noise": 1.0,
}


class SamplerDPMAdaptative(io.ComfyNode):
    """DPM-Solver with steps of adapted size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        order = io.Int.Input("order", default=3, min=2, max=3)
        options = [number(name, usual, 100.0) for name, usual in ADAPTIVE_OPTIONS.items()]
        return chooser("SamplerDPMAdaptative", [order, *options])

    @classmethod
    def execute(cls, order: int, **options: float) -> io.NodeOutput:
        return made("dpm_adaptive", order=order, **options)

    get_sampler = execute


ER_SDE_KINDS = ("ER-SDE", "Reverse-time SDE", "ODE")


class SamplerER_SDE(io.ComfyNode):
    """Extended reverse-time SDE solvers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.Combo.Input("solver_type", options=list(ER_SDE_KINDS)),
            io.Int.Input("max_stage", default=3, min=1, max=3),
            eta(),
            s_noise(),
        ]
        return chooser("SamplerER_SDE", inputs)

    @classmethod
    def execute(cls, solver_type: str, max_stage: int, eta: float, s_noise: float) -> io.NodeOutput:
        if solver_type == "ODE" or (solver_type != "ER-SDE" and eta == 0):  # what noise is left
            eta, s_noise = 0.0, 0.0  # would be that of rounding
        scaler = er_sde.default_noise_scaler
        if solver_type != "ER-SDE":  # the reverse-time SDE, deterministic at eta 0

            def scaler(level: Tensor) -> Tensor:
                return level ** (eta + 1)

        return made("er_sde", s_noise=s_noise, noise_scaler=scaler, max_stage=max_stage)

    get_sampler = execute


class SamplerSASolver(io.ComfyNode):
    """Stochastic Adams solver."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def percent(id: str, default: float) -> io.Float.Input:
            return io.Float.Input(id, default=default, min=0.0, max=1.0, step=0.001)

        inputs = [
            io.Model.Input("model"),
            number("eta", 1.0, 10.0),
            percent("sde_start_percent", 0.2),
            percent("sde_end_percent", 0.8),
            s_noise(),
            io.Int.Input("predictor_order", default=3, min=1, max=6),
            io.Int.Input("corrector_order", default=4, min=0, max=6),
            io.Boolean.Input("use_pece"),
            io.Boolean.Input("simple_order_2"),
        ]
        return chooser("SamplerSASolver", inputs)

    @classmethod
    def execute(
        cls,
        model: Any,
        eta: float,
        sde_start_percent: float,
        sde_end_percent: float,
        s_noise: float,
        predictor_order: int,
        corrector_order: int,
        use_pece: bool,
        simple_order_2: bool,
    ) -> io.NodeOutput:
        sampling = model.get_model_object("model_sampling")
        first = sampling.percent_to_sigma(sde_start_percent)
        last = sampling.percent_to_sigma(sde_end_percent)
        return made(
            "sa_solver",
            tau_func=sa_solver.get_tau_interval_func(first, last, eta),
            s_noise=s_noise,
            predictor_order=predictor_order,
            corrector_order=corrector_order,
            use_pece=use_pece,
            simple_order_2=simple_order_2,
        )

    get_sampler = execute


class SamplerSEEDS2(io.ComfyNode):
    """SEEDS-2: two evaluations a step."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.Combo.Input("solver_type", options=["phi_1", "phi_2"]),
            eta(),
            s_noise(),
            number("r", 0.5, 1.0, 0.01),
        ]
        return chooser("SamplerSEEDS2", inputs)

    @classmethod
    def execute(cls, solver_type: str, eta: float, s_noise: float, r: float) -> io.NodeOutput:
        return made("seeds_2", eta=eta, s_noise=s_noise, r=r, solver_type=solver_type)

    get_sampler = execute


NODES: list[type[io.ComfyNode]] = [
    KSamplerSelect,
    SamplerEulerAncestral,
    SamplerEulerAncestralCFGPP,
    SamplerLMS,
    SamplerDPMPP_3M_SDE,
    SamplerDPMPP_2M_SDE,
    SamplerDPMPP_SDE,
    SamplerDPMPP_2S_Ancestral,
    SamplerDPMAdaptative,
    SamplerER_SDE,
    SamplerSASolver,
    SamplerSEEDS2,
]
