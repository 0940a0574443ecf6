"""Sampling: from noise and conditioning to a latent.

Four independent choices meet here: where the noise levels lie (``schedules``), how one level
follows from the last (``solvers``), what the network's output means (``parameterisation``,
``noise_levels``) and which conditions steer it (``conditioning``, ``batching``, ``guidance``). A
solver only ever sees ``model(x, sigma) -> denoised``.
"""
