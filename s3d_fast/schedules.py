"""Learning-rate schedules, where people look for them: `from s3d_fast.schedules import cosine`."""

from s3d_fast.growth.schedules import constant, cosine, step_decay, warmed_up

__all__ = ["constant", "cosine", "step_decay", "warmed_up"]
