"""Growing a network: training, phases, the folder of a run, and grown networks on disk."""

from s3d_fast.growth.grower import Grower
from s3d_fast.growth.record import Phase

__all__ = ["Grower", "Phase"]
