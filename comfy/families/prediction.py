"""Joins a prediction type with the noise levels it goes with: the `model_sampling` object of a
model.
"""

from __future__ import annotations

from typing import Any

from comfy.families.model_type import ModelType
from comfy.sampling import noise_levels


def model_sampling(model_config: Any, model_type: ModelType) -> Any:
    """Sampling object of a model, with the settings of its family."""
    return noise_levels.build_model_sampling(model_type.name, model_config)
