"""PointNet and PointNet++: against loops, independent of the order of points; they grow, shrink and train."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.models import PointNet, PointNet2
from s3d_fast.models.point_parts import ball_query, farthest_points
from s3d_fast.models.pointnet import Transform
from s3d_fast.models.pointnet2 import SetAbstraction
from tests.model_cases import BY_NAME, ModelCase, data, outputs, random_plan, randomise_norms, squared_error, traced

CASES = [BY_NAME["pointnet"], BY_NAME["pointnet2"]]
every_network = pytest.mark.parametrize("case", CASES, ids=str)


def squared_distance(a: list[float], b: list[float]) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def naive_farthest(cloud: Tensor, count: int) -> list[int]:
    points, mean = cloud.tolist(), cloud.mean(0).tolist()
    chosen = [max(range(len(points)), key=lambda i: squared_distance(points[i], mean))]
    while len(chosen) < count:
        chosen.append(
            max(range(len(points)), key=lambda i: min(squared_distance(points[i], points[j]) for j in chosen))
        )
    return chosen


def naive_ball(cloud: Tensor, centre: Tensor, radius: float, k: int) -> list[int]:
    distances = [(squared_distance(point, centre.tolist()) ** 0.5, i) for i, point in enumerate(cloud.tolist())]
    inside = [i for distance, i in sorted(distances) if distance <= radius][:k]
    return inside + [min(distances)[1]] * (k - len(inside))


@pytest.mark.parametrize("count", [1, 5, 17])
def test_farthest_points_agree_with_a_loop(count: int) -> None:
    clouds = data(4, 17, 3)
    assert farthest_points(clouds, count).tolist() == [naive_farthest(cloud, count) for cloud in clouds]


def test_as_many_farthest_points_as_there_are_points_are_all_of_them() -> None:
    assert farthest_points(data(2, 9, 3), 9).sort().values.tolist() == [list(range(9))] * 2


@pytest.mark.parametrize("radius", [0.3, 1.0, 10.0])
@pytest.mark.parametrize("k", [1, 4, 17])
def test_balls_agree_with_a_loop(radius: float, k: int) -> None:
    clouds, centres = data(3, 17, 3), data(3, 5, 3, seed=2)
    found = ball_query(clouds, centres, radius, k).tolist()
    assert found == [
        [naive_ball(cloud, centre, radius, k) for centre in some] for cloud, some in zip(clouds, centres, strict=True)
    ]


def test_the_operations_have_the_shapes_that_they_announce() -> None:
    cloud = data(2, 9, 3)
    torch.library.opcheck(farthest_points, (cloud, 4))
    torch.library.opcheck(ball_query, (cloud, cloud[:, :3], 1.0, 4))


@every_network
def test_the_order_of_the_points_does_not_matter(case: ModelCase) -> None:
    model, x = case.model(), case.inputs()
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(outputs(model, x[:, order]), outputs(model, x), rtol=1e-12, atol=1e-12)
    # Other points give other scores.
    assert (outputs(model, x + 0.1 * data(*x.shape, seed=9)) - outputs(model, x)).abs().max() > 1e-3


@every_network
def test_a_cloud_does_not_depend_on_the_others_of_its_batch(case: ModelCase) -> None:
    model, x = case.model(), case.inputs()
    alone = torch.cat([outputs(model, cloud.unsqueeze(0)) for cloud in x])
    torch.testing.assert_close(outputs(model, x), alone, rtol=1e-12, atol=1e-12)


def layer_by_layer(layers: nn.Sequential, point: Tensor) -> Tensor:
    """Return the features of one point in eval mode, by the layers' weights."""
    for conv, norm, activation in zip(layers[0::3], layers[1::3], layers[2::3], strict=True):
        point = conv.weight.squeeze() @ point
        point = (point - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
        point = activation(point)
    return point


def test_a_pointnet_is_the_maximum_over_points_of_one_function() -> None:
    case = BY_NAME["pointnet"]
    model, x = case.model(), case.inputs()
    assert isinstance(model, PointNet)

    def mapped(transform: nn.Module, points: list[Tensor]) -> list[Tensor]:
        assert isinstance(transform, Transform)
        pooled = torch.stack([layer_by_layer(transform.shared, point) for point in points]).amax(0)
        rows = transform.head(pooled.unsqueeze(0)).reshape(len(points[0]), len(points[0]))
        return [rows @ point for point in points]

    with torch.no_grad():
        for cloud, scores in zip(x, model(x), strict=True):
            points = mapped(model.input_transform, list(cloud))
            points = mapped(model.feature_transform, [layer_by_layer(model.local, point) for point in points])
            pooled = torch.stack([layer_by_layer(model.deep, point) for point in points]).amax(0)
            torch.testing.assert_close(model.head(pooled.unsqueeze(0))[0], scores, rtol=1e-12, atol=1e-12)


def test_a_level_agrees_with_a_loop_over_its_balls() -> None:
    torch.manual_seed(0)
    level = SetAbstraction(2, (4, 5, 6), centres=7, radius=1.2, neighbours=3, activation=nn.ReLU).double()
    randomise_norms(level)
    level.eval()
    x, features = data(2, 12, 3), data(2, 12, 2, seed=4)
    with torch.no_grad():
        centres, found = level(x, features)
        for cloud, own, some, result in zip(x, features, centres, found, strict=True):
            assert some.tolist() == cloud[naive_farthest(cloud, 7)].tolist()
            for centre, vector in zip(some, result, strict=True):
                ball = naive_ball(cloud, centre, 1.2, 3)
                edges = [layer_by_layer(level.shared, torch.cat([cloud[j] - centre, own[j]])) for j in ball]
                torch.testing.assert_close(torch.stack(edges).amax(0), vector, rtol=1e-12, atol=1e-12)


def test_transforms_begin_as_the_identity() -> None:
    torch.manual_seed(0)
    model, plain = PointNet((4, 5, 6)).eval(), PointNet((4, 5, 6), input_transform=False, feature_transform=False)
    own = {name: tensor for name, tensor in model.state_dict().items() if "_transform" not in name}
    plain.load_state_dict(own)
    x = torch.randn(2, 9, 3)
    torch.testing.assert_close(outputs(model, x), outputs(plain, x))
    with torch.no_grad():
        model.feature_transform.head[-1].weight.normal_()
    assert (outputs(model, x) - outputs(plain, x)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("transforms", "params", "macs"), [(True, 3.5, 440), (False, 0.8, 148)], ids=["transforms", "plain"]
)
def test_pointnet_has_the_size_that_its_paper_states(transforms: bool, params: float, macs: float) -> None:
    model = PointNet(input_transform=transforms, feature_transform=transforms).eval()
    cost = s3d.count(s3d.trace(model, torch.zeros(1, 1024, 3)))
    assert cost.params / 1e6 == pytest.approx(params, rel=0.03)
    assert cost.macs / 1e6 == pytest.approx(macs, rel=0.03)
    assert cost.params == sum(parameter.numel() for parameter in model.parameters())


def test_pointnet2_has_the_size_of_its_layers() -> None:
    model = PointNet2().eval()
    levels = [(3, 64, 64, 128), (131, 128, 128, 256), (259, 256, 512, 1024)]
    positions = [512 * 32, 128 * 64, 128]
    products = [[a * b for a, b in itertools.pairwise(widths)] for widths in levels]
    head = 1024 * 512 + 512 * 256 + 256 * 40
    norms = 2 * (sum(sum(widths[1:]) for widths in levels) + 512 + 256)
    cost = s3d.count(s3d.trace(model, torch.zeros(1, 1024, 3)))
    assert cost.params == sum(map(sum, products)) + head + norms + 512 + 256 + 40
    assert cost.macs == sum(n * sum(level) for n, level in zip(positions, products, strict=True)) + head


def test_only_layers_around_transforms_keep_their_width() -> None:
    _, graph = traced(BY_NAME["pointnet"])
    kept = {
        name: because
        for name, kind, _, splittable, because in graph.explained()
        if splittable == "no" and kind != "batchnorm"
    }
    assert set(kept) == {"input_transform.head.8", "feature_transform.head.8", "local.3", "head.8"}
    assert "feature_transform" in kept["local.3"]
    plain = PointNet((4, 5, 6), 3, hidden=(4,), input_transform=False, feature_transform=False).eval()
    assert list(s3d.trace(plain, torch.zeros(2, 9, 3)).units) == ["local.0", "local.3", "deep.0", "head.0"]


@every_network
def test_growth_keeps_the_scores_and_training_goes_on(case: ModelCase) -> None:
    original, graph = traced(case, kinked=True)
    x, target = case.batch(original)
    operators = s3d.capture(original, squared_error, [(x, target)], graph, eps=0.01)
    assert tuple(operators) == case.units
    plan = s3d.select(s3d.extremal_eigenpairs(operators), graph, m=2, c=1.3, fraction=0.5)
    for eps in (0.0, 0.01):
        model = copy.deepcopy(original)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
        s3d.apply_splits(model, plan, eps=eps, optimizer=optimizer)
        change = float((outputs(model, x) - outputs(original, x)).abs().max())
        assert change <= 1e-10 if eps == 0 else 1e-6 < change < 1
        assert_trains(model, optimizer, x, target)
    every = copy.deepcopy(original)
    s3d.apply_splits(every, random_plan(graph, 3), eps=0.0)
    torch.testing.assert_close(outputs(every, x), outputs(original, x), rtol=1e-10, atol=1e-10)


@every_network
def test_pruning_masks_neurons_and_training_goes_on(case: ModelCase) -> None:
    original, graph = traced(case, kinked=True)
    x, target = case.batch(original)
    model = copy.deepcopy(original)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    plan = s3d.select_removals(s3d.filter_norms(model, graph), graph, fraction=0.2)
    # With a check, the outputs are those of the model whose neurons are masked, or nothing is removed.
    s3d.prune(model, plan, optimizer, check=x)
    removed = sum(p.numel() for p in original.parameters()) - sum(p.numel() for p in model.parameters())
    assert removed > 0
    assert_trains(model, optimizer, x, target)


def assert_trains(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> None:
    """Assert that the optimizer holds the model's parameters, and that a small step decreases the loss."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()}
    model.train()
    loss = squared_error(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert squared_error(model(x), target) < loss


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PointNet((4, 4)), r"widths must be at least three, got \(4, 4\)"),
        (lambda: PointNet2((4,) * 8), r"widths must be 9, 3 for each of 2 levels"),
        (lambda: PointNet2((4,) * 9, radii=(0.2,)), "one entry per level, got 2, 1 and 2 entries"),
    ],
    ids=["pointnet", "pointnet2", "levels"],
)
def test_bad_sizes_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
