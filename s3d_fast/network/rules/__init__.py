"""The rules of all operations: how channels pass through each of them. One class for each kind of operation."""

from s3d_fast.network.rules import elementwise, norms, points, products, refused, spatial, views
from s3d_fast.network.rules.rule import Rule, register_operation, rule_of

__all__ = [
    "Rule",
    "elementwise",
    "norms",
    "points",
    "products",
    "refused",
    "register_operation",
    "rule_of",
    "spatial",
    "views",
]
