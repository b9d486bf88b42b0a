"""The rule of EdgeConv's neighbour search."""

from __future__ import annotations

from s3d_fast.network.calls import Call, shape
from s3d_fast.network.flow import Flow, Product, Value
from s3d_fast.network.rules.rule import Rule, rule


@rule("s3d_network.nearest_points")
class NearestPoints(Rule):
    """Distances in a weighted metric: copies of a channel share its weight, so that distances stay as they were."""

    kind = "edgeconv"

    def follow(self, call: Call, flow: Flow) -> Value:
        x, metric = flow.value(call["x"]), flow.value(call["metric"])
        clouds, points, features = shape(call["x"])
        slots = x.axes.get(2)
        if slots is None:
            flow.block(metric, f"{call.words} reads channels that no layer makes")
        else:
            flow.slots.tie(slots, metric.axes[0])
            flow.shared.append(metric.axes[0])
        factor = float(clouds * points * points) * (features if slots is None else 1)
        flow.products.append(Product(call.node, factor, () if slots is None else (slots,)))
        return Value()
