"""Prediction types by the names that families and custom nodes use."""

from __future__ import annotations

from enum import Enum


class ModelType(Enum):
    """What a diffusion network predicts and how its noise levels are spaced."""

    EPS = 1
    V_PREDICTION = 2
    V_PREDICTION_EDM = 3
    STABLE_CASCADE = 4
    EDM = 5
    FLOW = 6
    V_PREDICTION_CONTINUOUS = 7
    FLUX = 8
    IMG_TO_IMG = 9
    FLOW_COSMOS = 10
    IMG_TO_IMG_FLOW = 11
    FLOW_AV = 12
