"""The networks of the models and their kinds of rows, as plain numbers.

Also a process with the kernels of another checkout can import them.

A layer is (rows, inputs, filters, bias, clouds). With clouds it is EdgeConv, whose filters have twice as many inputs.
"""

from __future__ import annotations

# Kinds of rows: their dtype, and the precision of products.
KINDS = {"fp32": ("float32", "highest"), "fp32 high": ("float32", "high"), "bf16": ("bfloat16", "highest")}

# MobileNetV1 1.0x on 32 images of 224 x 224: the pointwise layers. tests/kernels/test_roofline.py compares them.
_MOBILENET = [
    (401408, 32, 64), (100352, 64, 128), (100352, 128, 128), (25088, 128, 256), (25088, 256, 256), (6272, 256, 512),
    *[(6272, 512, 512)] * 5, (1568, 512, 1024), (1568, 1024, 1024),
]  # fmt: skip
# DGCNN on 16 clouds of 1024 points: four EdgeConv layers, the embedding and the head.
_DGCNN = [
    (16384, 512, 1024), (16, 2048, 512, True), (16, 512, 256, True),
    *[(16384, F, M, False, 16) for F, M in ((3, 64), (64, 64), (64, 128), (128, 256))],
]  # fmt: skip
NETWORK_SHAPES: dict[str, list[tuple]] = {
    "MobileNetV1 1.0x, ImageNet, batch 32": _MOBILENET,
    "DGCNN, batch 16": _DGCNN,
}
