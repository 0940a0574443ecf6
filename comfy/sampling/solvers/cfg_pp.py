"""CFG++ solvers need the unconditional estimate beside the guided one; this catches it."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from comfy import progress

logger = logging.getLogger(__name__)


class UnconditionalCapture:
    """Adds a post-CFG hook to a run's options that remembers the unconditional estimate.

    Args:
        extra_args: Arguments of the solver's model calls; they are copied, not changed.

    Attributes:
        extra_args: The copy, with the hook, and with the unconditional pass forced even at a
            guidance scale of 1.
    """

    def __init__(self, extra_args: dict[str, Any] | None) -> None:
        self._denoised: Tensor | None = None
        options = dict((extra_args or {}).get("model_options") or {})
        hooks = options.get("sampler_post_cfg_function", [])
        options["sampler_post_cfg_function"] = [*hooks, self._remember]
        options["disable_cfg1_optimization"] = True
        self.extra_args = {**(extra_args or {}), "model_options": options}

    def _remember(self, args: dict[str, Any]) -> Tensor:
        if self._denoised is None and not args.get("uncond", True):
            progress.warn(
                logger,
                "a CFG++ sampler measures the noise from the negative estimate, but this guider "
                "has no negative conditioning, and zeros stand in its place: use CFGGuider, or a "
                "sampler without CFG++",
            )
        self._denoised = args["uncond_denoised"]
        return args["denoised"]

    @property
    def denoised(self) -> Tensor:
        """Unconditional estimate of the latest model call."""
        if self._denoised is None:
            raise RuntimeError(
                "this CFG++ sampler needs the unconditional estimate, but the guider ran no "
                "post-CFG functions; use a guider with a negative conditioning (CFGGuider)"
            )
        return self._denoised
