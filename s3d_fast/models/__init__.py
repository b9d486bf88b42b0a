"""Ordinary networks to grow: nothing in them refers to splitting, except EdgeConv's metric."""

from s3d_fast.models.dgcnn import DGCNN
from s3d_fast.models.mlp import MLP
from s3d_fast.models.mobilenet import MobileNetV1
from s3d_fast.models.pointnet import PointNet
from s3d_fast.models.pointnet2 import PointNet2
from s3d_fast.models.rbf_batch import RBFBatch
from s3d_fast.models.resnet import ResNet
from s3d_fast.models.transformer import TransformerBlock
from s3d_fast.models.vgg import VGG19
from s3d_fast.network.edgeconv import EdgeConv

__all__ = [
    "DGCNN",
    "MLP",
    "VGG19",
    "EdgeConv",
    "MobileNetV1",
    "PointNet",
    "PointNet2",
    "RBFBatch",
    "ResNet",
    "TransformerBlock",
]
