"""Pictures of filters before and after a split, by guided backpropagation: the figure of the paper's appendix."""

from s3d_fast.visualize.drawing import SIGNIFICANT, draw
from s3d_fast.visualize.guided import RECTIFIERS, guided_backpropagation
from s3d_fast.visualize.loading import load_image, load_vgg19
from s3d_fast.visualize.pictures import FilterPicture, filter_pictures, interesting_filters

__all__ = [
    "RECTIFIERS",
    "SIGNIFICANT",
    "FilterPicture",
    "draw",
    "filter_pictures",
    "guided_backpropagation",
    "interesting_filters",
    "load_image",
    "load_vgg19",
]
