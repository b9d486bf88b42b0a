"""s3d-fast visualize: pictures of filters before and after splitting."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from s3d_fast import visualize
from s3d_fast.base.tables import text_table
from s3d_fast.commands.parsing import Parser
from s3d_fast.data.cifar import NORMALISE as CIFAR_NORMALISE
from s3d_fast.data.images import IMAGENET_NORMALISE
from s3d_fast.recipes.saved import load_network, recipe_of, saved_network


def add(command: Parser) -> None:
    """Add the options and the description."""
    command.description = (
        "Find the filters of a layer with extreme eigenvalues and draw them before and after splitting."
    )
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, metavar="RUN", dest="folder", help="folder of a run, for its network")
    source.add_argument("--vgg19", type=Path, metavar="FILE", help="weights of VGG-19, with BatchNorm or without")
    command.add_argument("--phase", type=int, help="phase of the run; the last by default")
    command.add_argument("--image", type=Path, required=True, metavar="FILE", help="any picture")
    command.add_argument("--label", type=int, help="class of the image; the network's answer by default")
    command.add_argument("--layer", help="name of the layer; the last convolution by default")
    command.add_argument("--eps", type=float, default=0.01, help="size of a split; default: %(default)s")
    command.add_argument("--c", type=float, default=1.3, help="bound c of the gain G_4; default: %(default)s")
    command.add_argument("--all", action="store_true", help="draw the opposite extremes too")
    command.add_argument("--out", type=Path, default=Path("runs/filters.png"), help="default: %(default)s")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table of filters and draw the figure."""
    if options.vgg19 is not None:
        model, size, normalise = visualize.load_vgg19(options.vgg19), 224, IMAGENET_NORMALISE
    else:
        about, path = saved_network(options.folder, options.phase)
        recipe, size = recipe_of(about), about["input_shape"][-1]
        normalise = CIFAR_NORMALISE if recipe.dataset == "cifar100" else IMAGENET_NORMALISE
        if len(about["input_shape"]) != 3 or about["input_shape"][0] != 3:
            raise ValueError(f"--run: the network must take images of three channels, got {about['input_shape']}")
        model = load_network(about, path)
    image = visualize.load_image(options.image, size, normalise)
    if options.label is None:
        with torch.no_grad():
            label = int(model.eval()(image).argmax())
        print(f"The network takes the image for class {label}.")
    else:
        label = options.label
    pictures = visualize.filter_pictures(
        model, image, torch.tensor([label]), options.layer, eps=options.eps, c=options.c, all_extremes=options.all
    )
    rows = [["filter", "of", "lambda_min", "lambda_max", "G_4", "rho"]]
    for picture in pictures:
        values = (picture.lambda_min, picture.lambda_max, picture.gain, picture.radius)
        rows.append([str(picture.filter), picture.title, *(f"{value:.3g}" for value in values)])
    print(text_table(rows))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    visualize.draw(image, pictures, options.out, normalise)
    print(f"Written: {options.out}")
    return 0
