"""Nodes that make and edit lists of noise levels (SIGMAS)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from comfy.sampling import schedule_curves, schedules, sigma_edits
from comfy.sampling.samplers import KSampler
from comfy_api.latest import io

SCHEDULERS = "sampling/custom_sampling/schedulers"
SIGMAS = "sampling/custom_sampling/sigmas"
LARGEST_SIGMA = 20000.0
LARGEST_STEPS = 10000


def steps_input(default: int = 20, most: int = LARGEST_STEPS) -> io.Int.Input:
    """Declaration of a number of steps."""
    return io.Int.Input("steps", default=default, min=1, max=most)


def number(id: str, default: float, most: float, least: float = 0.0) -> io.Float.Input:
    """Declaration of a number that is not rounded."""
    return io.Float.Input(id, default=default, min=least, max=most, step=0.01, round=False)


def ends() -> list[io.Input]:
    """Declarations of the highest and the lowest level."""
    return [number("sigma_max", 14.614642, 5000.0), number("sigma_min", 0.0291675, 5000.0)]


def denoise_input(least: float = 0.0) -> io.Float.Input:
    """Declaration of the share of a schedule that is run."""
    return io.Float.Input("denoise", default=1.0, min=least, max=1.0, step=0.01)


def schedule(node_id: str, inputs: Sequence[io.Input]) -> io.Schema:
    """Declaration of a node that makes levels."""
    return io.Schema(
        node_id=node_id, category=SCHEDULERS, inputs=[*inputs], outputs=[io.Sigmas.Output()]
    )


class BasicScheduler(io.ComfyNode):
    """Levels of a scheduler by name."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = io.Combo.Input("scheduler", options=KSampler.SCHEDULERS)
        return schedule(
            "BasicScheduler", [io.Model.Input("model"), names, steps_input(), denoise_input()]
        )

    @classmethod
    def execute(cls, model: Any, scheduler: str, steps: int, denoise: float) -> io.NodeOutput:
        sampling = model.get_model_object("model_sampling")
        return io.NodeOutput(schedules.basic_schedule(sampling, scheduler, steps, denoise))

    get_sigmas = execute


class KarrasScheduler(io.ComfyNode):
    """Levels whose rho-th root falls evenly."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schedule("KarrasScheduler", [steps_input(), *ends(), number("rho", 7.0, 100.0)])

    @classmethod
    def execute(cls, steps: int, sigma_max: float, sigma_min: float, rho: float) -> io.NodeOutput:
        return io.NodeOutput(schedules.get_sigmas_karras(steps, sigma_min, sigma_max, rho))

    get_sigmas = execute


class ExponentialScheduler(io.ComfyNode):
    """Levels whose logarithm falls evenly."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schedule("ExponentialScheduler", [steps_input(), *ends()])

    @classmethod
    def execute(cls, steps: int, sigma_max: float, sigma_min: float) -> io.NodeOutput:
        return io.NodeOutput(schedules.get_sigmas_exponential(steps, sigma_min, sigma_max))

    get_sigmas = execute


class PolyexponentialScheduler(io.ComfyNode):
    """Levels whose logarithm falls along a power."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        rho = number("rho", 1.0, 100.0)
        return schedule("PolyexponentialScheduler", [steps_input(), *ends(), rho])

    @classmethod
    def execute(cls, steps: int, sigma_max: float, sigma_min: float, rho: float) -> io.NodeOutput:
        return io.NodeOutput(
            schedule_curves.get_sigmas_polyexponential(steps, sigma_min, sigma_max, rho)
        )

    get_sigmas = execute


class LaplaceScheduler(io.ComfyNode):
    """Levels whose log-SNR follows a Laplace distribution."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def tenth(id: str, default: float, least: float) -> io.Float.Input:
            return io.Float.Input(id, default=default, min=least, max=10.0, step=0.1, round=False)

        inputs = [steps_input(), *ends(), tenth("mu", 0.0, -10.0), tenth("beta", 0.5, 0.0)]
        return schedule("LaplaceScheduler", inputs)

    @classmethod
    def execute(
        cls, steps: int, sigma_max: float, sigma_min: float, mu: float, beta: float
    ) -> io.NodeOutput:
        return io.NodeOutput(
            schedule_curves.get_sigmas_laplace(steps, sigma_min, sigma_max, mu, beta)
        )

    get_sigmas = execute


class SDTurboScheduler(io.ComfyNode):
    """Levels of the timesteps that one-step models were trained on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        share = io.Float.Input("denoise", default=1.0, min=0, max=1.0, step=0.01)
        return schedule("SDTurboScheduler", [io.Model.Input("model"), steps_input(1, 10), share])

    @classmethod
    def execute(cls, model: Any, steps: int, denoise: float) -> io.NodeOutput:
        sampling = model.get_model_object("model_sampling")
        return io.NodeOutput(schedule_curves.turbo_schedule(sampling, steps, denoise))

    get_sigmas = execute


class BetaSamplingScheduler(io.ComfyNode):
    """Levels at quantiles of a beta distribution."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        shape = [number("alpha", 0.6, 50.0), number("beta", 0.6, 50.0)]
        return schedule("BetaSamplingScheduler", [io.Model.Input("model"), steps_input(), *shape])

    @classmethod
    def execute(cls, model: Any, steps: int, alpha: float, beta: float) -> io.NodeOutput:
        sampling = model.get_model_object("model_sampling")
        return io.NodeOutput(schedules.beta_scheduler(sampling, steps, alpha=alpha, beta=beta))

    get_sigmas = execute


class VPScheduler(io.ComfyNode):
    """Levels even in the time of a variance-preserving diffusion."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            steps_input(),
            number("beta_d", 19.9, 5000.0),
            number("beta_min", 0.1, 5000.0),
            io.Float.Input("eps_s", default=0.001, min=0.0, max=1.0, step=0.0001, round=False),
        ]
        return schedule("VPScheduler", inputs)

    @classmethod
    def execute(cls, steps: int, beta_d: float, beta_min: float, eps_s: float) -> io.NodeOutput:
        return io.NodeOutput(schedule_curves.get_sigmas_vp(steps, beta_d, beta_min, eps_s))

    get_sigmas = execute


class SplitSigmas(io.ComfyNode):
    """Cuts levels in two at a step."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        step = io.Int.Input("step", default=0, min=0, max=LARGEST_STEPS)
        return _split("SplitSigmas", step)

    @classmethod
    def execute(cls, sigmas: Tensor, step: int) -> io.NodeOutput:
        return io.NodeOutput(*sigma_edits.split_at_step(sigmas, step))

    get_sigmas = execute


class SplitSigmasDenoise(io.ComfyNode):
    """Cuts levels in two at a share of the steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _split("SplitSigmasDenoise", denoise_input())

    @classmethod
    def execute(cls, sigmas: Tensor, denoise: float) -> io.NodeOutput:
        return io.NodeOutput(*sigma_edits.split_at_denoise(sigmas, denoise))

    get_sigmas = execute


def _split(node_id: str, where: io.Input) -> io.Schema:
    """Declaration of a node with two lists of levels."""
    return io.Schema(
        node_id=node_id,
        category=SIGMAS,
        inputs=[io.Sigmas.Input("sigmas"), where],
        outputs=[
            io.Sigmas.Output(display_name="high_sigmas"),
            io.Sigmas.Output(display_name="low_sigmas"),
        ],
    )


def _edit(node_id: str, more: Sequence[io.Input]) -> io.Schema:
    """Declaration of a node that changes levels."""
    return io.Schema(
        node_id=node_id,
        category=SIGMAS,
        inputs=[io.Sigmas.Input("sigmas"), *more],
        outputs=[io.Sigmas.Output()],
    )


class FlipSigmas(io.ComfyNode):
    """Turns the order of levels round."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _edit("FlipSigmas", [])

    @classmethod
    def execute(cls, sigmas: Tensor) -> io.NodeOutput:
        return io.NodeOutput(sigma_edits.flip(sigmas))

    get_sigmas = execute


class SetFirstSigma(io.ComfyNode):
    """Replaces the first level."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        sigma = io.Float.Input(
            "sigma", default=136.0, min=0.0, max=LARGEST_SIGMA, step=0.001, round=False
        )
        return _edit("SetFirstSigma", [sigma])

    @classmethod
    def execute(cls, sigmas: Tensor, sigma: float) -> io.NodeOutput:
        return io.NodeOutput(sigma_edits.with_first(sigmas, sigma))

    set_first_sigma = execute


class ExtendIntermediateSigmas(io.ComfyNode):
    """Puts levels between levels."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.Int.Input("steps", default=2, min=1, max=100),
            number("start_at_sigma", -1.0, LARGEST_SIGMA, -1.0),
            number("end_at_sigma", 12.0, LARGEST_SIGMA),
            io.Combo.Input("spacing", options=list(sigma_edits.SPACINGS)),
        ]
        return _edit("ExtendIntermediateSigmas", inputs)

    @classmethod
    def execute(
        cls,
        sigmas: Tensor,
        steps: int,
        start_at_sigma: float,
        end_at_sigma: float,
        spacing: str,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            sigma_edits.extend(sigmas, steps, start_at_sigma, end_at_sigma, spacing)
        )

    extend = execute


class SamplingPercentToSigma(io.ComfyNode):
    """Level at which a share of the sampling is done."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        actual = io.Boolean.Input(
            "return_actual_sigma",
            default=False,
            tooltip="Give the model's own first and last level rather than infinity and 0.",
        )
        return io.Schema(
            node_id="SamplingPercentToSigma",
            category=SIGMAS,
            inputs=[
                io.Model.Input("model"),
                io.Float.Input("sampling_percent", default=0.0, min=0.0, max=1.0, step=0.0001),
                actual,
            ],
            outputs=[io.Float.Output(display_name="sigma_value")],
        )

    @classmethod
    def execute(
        cls, model: Any, sampling_percent: float, return_actual_sigma: bool
    ) -> io.NodeOutput:
        sampling = model.get_model_object("model_sampling")
        if return_actual_sigma and sampling_percent in (0.0, 1.0):
            end = sampling.sigma_max if sampling_percent == 0.0 else sampling.sigma_min
            return io.NodeOutput(float(end))
        return io.NodeOutput(float(sampling.percent_to_sigma(sampling_percent)))

    get_sigma = execute


class ManualSigmas(io.ComfyNode):
    """Levels written by hand."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ManualSigmas",
            category="_for_testing/custom_sampling",
            is_experimental=True,
            inputs=[io.String.Input("sigmas", default="1, 0.5")],
            outputs=[io.Sigmas.Output()],
        )

    @classmethod
    def execute(cls, sigmas: str) -> io.NodeOutput:
        return io.NodeOutput(sigma_edits.parse(sigmas))


NODES: list[type[io.ComfyNode]] = [
    BasicScheduler,
    KarrasScheduler,
    ExponentialScheduler,
    PolyexponentialScheduler,
    LaplaceScheduler,
    VPScheduler,
    BetaSamplingScheduler,
    SDTurboScheduler,
    SplitSigmas,
    SplitSigmasDenoise,
    FlipSigmas,
    SetFirstSigma,
    ExtendIntermediateSigmas,
    SamplingPercentToSigma,
    ManualSigmas,
]
