"""The reference: splitting matrices against the second derivative of the loss of a network that really is split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast import Activation, activation
from s3d_fast.backends import operations
from s3d_fast.maths import reference
from tests.cases import (
    CONVS,
    DEPTHWISE,
    EDGES,
    ROWS,
    TOLERANCE,
    ConvCase,
    DepthwiseCase,
    EdgeCase,
    RowsCase,
    compute_dtype,
    random_vectors,
    relative_error,
)

SMOOTH = ("silu", "gelu", "tanh", "gaussian")

LINEAR = (RowsCase(11, 5, 4), RowsCase(11, 5, 4, bias=True))
CONV = tuple(case for case in CONVS if case.dtype == torch.float64)
EDGE = tuple(case for case in EDGES if case.dtype == torch.float64)

every_smooth_activation = pytest.mark.parametrize("name", SMOOTH)
with_and_without_batchnorm = pytest.mark.parametrize("batchnorm", [False, True], ids=["plain", "batchnorm"])


class Affine:
    """What a BatchNorm in evaluation does to channel j of the last dimension: a -> s_j a + t_j."""

    def __init__(self, channels: int, batchnorm: bool) -> None:
        self.norm: nn.BatchNorm1d | None = None
        self.scale: Tensor | None = None
        if batchnorm:
            norm = nn.BatchNorm1d(channels, dtype=torch.float64).eval().requires_grad_(False)
            norm.weight.copy_(torch.linspace(-1.2, 1.5, channels))
            norm.bias.copy_(torch.linspace(0.5, -0.3, channels))
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.copy_(torch.linspace(-0.2, 0.4, channels))
            norm.running_var.copy_(torch.linspace(0.5, 2.0, channels))
            self.norm, self.scale = norm, norm.weight / (norm.running_var + norm.eps).sqrt()

    def __call__(self, a: Tensor) -> Tensor:
        if self.norm is None:
            return a
        return self.norm(a.reshape(-1, a.shape[-1])).reshape(a.shape)


def head_loss(h: Tensor) -> Tensor:
    """Return a loss that is far from linear in h (samples, channels)."""
    W = random_vectors(3, h.shape[-1], seed=7)
    logits = 2 * torch.tanh(h @ W.T)
    target = torch.arange(len(h)) % 3
    return F.cross_entropy(logits, target) + (h.mean(0) ** 2).sum() + 0.1 * (h.prod(-1)).sum()


def split_hessian(
    layer: Callable[[Tensor], Tensor], theta: Tensor, V: Tensor, loss: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the Hessian, at e = 0, of the loss when every neuron j is split into theta_j +- e_j v_j, weights 1/2."""

    def split_loss(e: Tensor) -> Tensor:
        move = e[:, None] * V
        return loss(0.5 * layer(theta + move) + 0.5 * layer(theta - move))

    return torch.autograd.functional.hessian(split_loss, torch.zeros(len(theta), dtype=torch.float64))


def gradient(loss: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    h = h.detach().requires_grad_()
    return torch.autograd.grad(loss(h), h)[0]


def assert_is_the_split_hessian(quadratic: Tensor, hessian: Tensor) -> None:
    assert hessian.diagonal().abs().min() > 1e-4, "the case is degenerate: it could not fail"
    torch.testing.assert_close(quadratic, hessian.diagonal(), rtol=1e-9, atol=1e-9)
    off_diagonal = hessian - hessian.diagonal().diag()
    torch.testing.assert_close(off_diagonal, torch.zeros_like(off_diagonal), rtol=0, atol=1e-9)


def coefficients(g: Tensor, z: Tensor, act: Activation, scale: Tensor | None) -> Tensor:
    """Return C for channels in the last dimension of g and z."""
    channels = g.shape[-1]
    return reference.curvature_coefficients(g.reshape(-1, channels), z.reshape(-1, channels), act, scale).reshape(
        g.shape
    )


@every_smooth_activation
@with_and_without_batchnorm
@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_linear_splitting_matrix_is_the_curvature_of_a_split(case: RowsCase, batchnorm: bool, name: str) -> None:
    X, _ = case.tensors()
    rows = reference.with_ones(X) if case.bias else X
    theta, V = random_vectors(2, case.M, rows.shape[1])
    affine, act = Affine(case.M, batchnorm), activation(name)

    z = affine(rows @ theta.T)
    C = coefficients(gradient(head_loss, act(z)), z, act, affine.scale)
    quadratic = (V * reference.splitting_matvec(X, C, V, case.bias)).sum(-1)

    hessian = split_hessian(lambda weight: act(affine(rows @ weight.T)), theta, V, head_loss)
    assert_is_the_split_hessian(quadratic, hessian)


@pytest.mark.parametrize("gate", ["identity", "tanh"])
@with_and_without_batchnorm
@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_gated_splitting_matrix_is_the_curvature_of_a_split(case: RowsCase, batchnorm: bool, gate: str) -> None:
    X, _ = case.tensors()
    rows = reference.with_ones(X) if case.bias else X
    theta, V = random_vectors(2, case.M, 2 * rows.shape[1])
    affine, act, psi = Affine(case.M, batchnorm), activation("silu"), activation(gate)

    def halves(parameters: Tensor) -> tuple[Tensor, Tensor]:
        a, b = parameters.split(rows.shape[1], -1)
        # The gate has a scale and a shift of its own.
        return affine(rows @ a.T), 0.7 * affine(rows @ b.T) + 0.2

    def layer(parameters: Tensor) -> Tensor:
        z, u = halves(parameters)
        return act(z) * psi(u)

    z, u = halves(theta)
    g = gradient(head_loss, layer(theta))
    scale = torch.ones(case.M, dtype=torch.float64) if affine.scale is None else affine.scale
    c11 = scale**2 * g * act.second(z) * psi(u)
    c12 = 0.7 * scale**2 * g * act.first(z) * psi.first(u)
    c22 = None if gate == "identity" else 0.49 * scale**2 * g * act(z) * psi.second(u)
    SV = reference.gated_matvec(X, c11, c12, c22, V, case.bias)

    assert_is_the_split_hessian((V * SV).sum(-1), split_hessian(layer, theta, V, head_loss))


@pytest.mark.parametrize("name", ["silu", "tanh"])
@with_and_without_batchnorm
@pytest.mark.parametrize("case", [case for case in DEPTHWISE if case.dtype == torch.float64], ids=str)
def test_depthwise_splitting_matrix_is_the_curvature_of_a_split(
    case: DepthwiseCase, batchnorm: bool, name: str
) -> None:
    X, _, _, weight = case.tensors()
    rows = reference.with_ones(X) if case.bias else X
    theta, V = random_vectors(2, case.M, rows.shape[1])
    affine, act = Affine(case.M, batchnorm), activation(name)
    stages = [stage for _, stage in case.stages]

    def chain(parameters: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs and outputs of every activation."""
        z = [affine(rows @ parameters.T).reshape(case.B, case.H, case.W, case.M)]
        h = [act(z[0])]
        for kernel, stage in zip(weight, stages, strict=True):
            geometry = (stage.stride, stage.padding, stage.dilation, case.M)
            z.append(affine(F.conv2d(h[-1].movedim(-1, 1), kernel[:, None], None, *geometry).movedim(1, -1)))
            h.append(act(z[-1]))
        return z, h

    def loss(h: Tensor) -> Tensor:
        # Every position counts differently, so that no symmetry between them hides an error.
        place = torch.linspace(0.5, 1.5, h[0, ..., 0].numel(), dtype=torch.float64).reshape(h.shape[1:3])
        return head_loss((h * place[..., None]).flatten(0, 2)) + h.sum() + (place[..., None] * h).sum() ** 2

    z, h = chain(theta.clone().requires_grad_())
    g = torch.autograd.grad(loss(h[-1]), h)
    z = [one.detach() for one in z]
    scale = torch.ones(case.M, dtype=torch.float64) if affine.scale is None else affine.scale
    C = [own * act.second(one) for own, one in zip(g, z, strict=True)]
    C[0] = C[0] * scale**2
    d = [act.first(one) for one in z[:-1]]
    d[0] = d[0] * scale
    kernels = [scale[:, None, None] * kernel for kernel in weight]
    SV = reference.depthwise_matvec(X, C, d, kernels, stages, V, case.bias)

    hessian = split_hessian(lambda parameters: chain(parameters)[1][-1], theta, V, loss)
    assert_is_the_split_hessian((V * SV).sum(-1), hessian)


@every_smooth_activation
@with_and_without_batchnorm
@pytest.mark.parametrize("case", CONV, ids=str)
def test_convolution_splitting_matrix_is_the_curvature_of_a_split(case: ConvCase, batchnorm: bool, name: str) -> None:
    X, _ = case.tensors()
    D = case.I * case.k[0] * case.k[1]
    theta, V = random_vectors(2, case.M, D + case.bias)
    affine, act = Affine(case.M, batchnorm), activation(name)

    def pre_activation(parameters: Tensor) -> Tensor:
        offset = parameters[:, -1] if case.bias else None
        a = F.conv2d(X, parameters[:, :D].reshape(case.M, case.I, *case.k), offset, **case.geometry)
        return affine(a.movedim(1, -1))

    def loss(h: Tensor) -> Tensor:
        # Every position counts differently, so that no symmetry between them hides an error.
        place = torch.linspace(0.5, 1.5, h[0, ..., 0].numel(), dtype=torch.float64).reshape(h.shape[1:3])
        return head_loss((h * place[..., None]).mean((1, 2)).repeat(2, 1)) + head_loss(h.flatten(0, 2))

    z = pre_activation(theta)
    C = coefficients(gradient(loss, act(z)), z, act, affine.scale).movedim(-1, 1)
    SV = reference.conv_matvec(X, C, V, case.k, case.s, case.p, case.d, case.bias)

    hessian = split_hessian(lambda parameters: act(pre_activation(parameters)), theta, V, loss)
    assert_is_the_split_hessian((V * SV).sum(-1), hessian)


@every_smooth_activation
@with_and_without_batchnorm
@pytest.mark.parametrize("case", EDGE, ids=str)
def test_edgeconv_splitting_matrix_is_the_curvature_of_a_split(case: EdgeCase, batchnorm: bool, name: str) -> None:
    X, neighbours, _, _ = case.tensors()
    others = torch.stack([points[around] for points, around in zip(X, neighbours, strict=True)])
    centres = X[:, :, None].expand_as(others)
    edges = torch.cat([others - centres, centres], -1)
    rows = torch.cat([edges, torch.ones_like(edges[..., :1])], -1) if case.bias else edges
    theta, V = random_vectors(2, case.M, rows.shape[-1])
    affine, act = Affine(case.M, batchnorm), activation(name)

    def loss(h: Tensor) -> Tensor:
        return head_loss(torch.cat([h.amax(1), h.mean(1)])) + head_loss(h.flatten(0, 1))

    z = affine(rows @ theta.T)
    h, slot = act(z).max(2)
    winner = neighbours.gather(2, slot)
    C = coefficients(gradient(loss, h), z.gather(2, slot[:, :, None]).squeeze(2), act, affine.scale)
    SV = reference.edgeconv_matvec(X, winner, C, V, case.bias)

    hessian = split_hessian(lambda weight: act(affine(rows @ weight.T)).amax(2), theta, V, loss)
    assert_is_the_split_hessian((V * SV).sum(-1), hessian)


@pytest.mark.parametrize("case", EDGES, ids=str)
@pytest.mark.parametrize("K", [None, 2], ids=["one", "K2"])
def test_point_level_edgeconv_is_the_edge_level_one(case: EdgeCase, K: int | None) -> None:
    X, neighbours, slot, C = case.tensors()
    shape = (case.M, 2 * case.F + case.bias)
    V = random_vectors(*shape if K is None else (K, *shape), dtype=case.dtype)
    points = reference.edgeconv_matvec(X, neighbours.gather(2, slot), C, V, case.bias)
    edges = reference.edgeconv_matvec_edges(X.double(), neighbours, slot, C.double(), V.double(), case.bias)
    assert points.dtype == compute_dtype(case.dtype)
    assert relative_error(points, edges) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_one_point_may_win_everywhere(bias: bool) -> None:
    X, _, slot, C = EdgeCase(2, 9, 3, 1, 5).tensors()
    neighbours = torch.full((2, 9, 1), 4)
    V = random_vectors(2, 5, 6 + bias)
    points = reference.edgeconv_matvec(X, torch.full_like(slot, 4), C, V, bias)
    assert relative_error(points, reference.edgeconv_matvec_edges(X, neighbours, slot, C, V, bias)) < 1e-12


def test_edge_rows_are_difference_and_centre() -> None:
    X, neighbours, _, _ = EdgeCase(2, 4, 3, 2, 1).tensors()
    rows = reference.edge_rows(X, neighbours)
    for b, i, k in [(0, 0, 0), (1, 2, 1), (0, 3, 1)]:
        centre, other = X[b, i], X[b, neighbours[b, i, k]]
        assert torch.equal(rows[b, i, k], torch.cat([other - centre, centre]))


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_linear_matvec_is_a_sum_over_rows(case: RowsCase) -> None:
    X, C = case.tensors()
    V = random_vectors(case.M, case.D + case.bias, dtype=case.dtype)
    rows = X.double()
    if case.bias:
        rows = torch.cat([rows, torch.ones(case.N, 1, dtype=torch.float64)], 1)
    expected = torch.stack(
        [sum(C[n, j].double() * (x @ V[j].double()) * x for n, x in enumerate(rows)) for j in range(case.M)]
    )
    actual = reference.splitting_matvec(X, C, V, case.bias)
    assert actual.dtype == compute_dtype(case.dtype)
    assert relative_error(actual, expected) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_dense_matrices_are_sums_of_outer_products(case: RowsCase) -> None:
    X, C = case.tensors()
    rows = X.double()
    if case.bias:
        rows = torch.cat([rows, torch.ones(case.N, 1, dtype=torch.float64)], 1)
    expected = torch.stack(
        [sum(C[n, j].double() * torch.outer(x, x) for n, x in enumerate(rows)) for j in range(case.M)]
    )
    actual = operations.splitting_matrices(X, C, bias=case.bias)
    assert actual.dtype == compute_dtype(case.dtype)
    assert relative_error(actual, expected) < TOLERANCE[case.dtype]
    assert relative_error(actual, actual.mT) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", CONVS, ids=str)
def test_convolution_matvec_is_the_linear_one_on_patches(case: ConvCase) -> None:
    X, C = case.tensors()
    patches = F.unfold(X.double(), case.k, case.d, case.p, case.s).mT.flatten(0, 1)
    V = random_vectors(case.M, patches.shape[1] + case.bias, dtype=case.dtype)
    expected = reference.splitting_matvec(patches, C.movedim(1, -1).reshape(-1, case.M), V.double(), case.bias)
    actual = reference.conv_matvec(X, C, V, case.k, case.s, case.p, case.d, case.bias)
    assert actual.dtype == compute_dtype(case.dtype)
    assert relative_error(actual, expected) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_several_vectors_are_several_products(bias: bool) -> None:
    X, C = RowsCase(13, 5, 4).tensors()
    V = random_vectors(3, 4, 5 + bias)
    together = reference.splitting_matvec(X, C, V, bias)
    assert relative_error(together, torch.stack([reference.splitting_matvec(X, C, v, bias) for v in V])) < 1e-13


@pytest.mark.parametrize("case", [case for case in CONV if case.M > 1], ids=str)
def test_several_vectors_are_several_convolution_products(case: ConvCase) -> None:
    X, C = case.tensors()
    V = random_vectors(3, case.M, case.I * case.k[0] * case.k[1] + case.bias)
    geometry = (case.k, case.s, case.p, case.d, case.bias)
    alone = torch.stack([reference.conv_matvec(X, C, v, *geometry) for v in V])
    assert relative_error(reference.conv_matvec(X, C, V, *geometry), alone) < 1e-13


@pytest.mark.parametrize("case", EDGE, ids=str)
def test_several_vectors_are_several_edgeconv_products(case: EdgeCase) -> None:
    X, neighbours, slot, C = case.tensors()
    winner = neighbours.gather(2, slot)
    V = random_vectors(3, case.M, 2 * case.F + case.bias)
    alone = torch.stack([reference.edgeconv_matvec(X, winner, C, v, case.bias) for v in V])
    assert relative_error(reference.edgeconv_matvec(X, winner, C, V, case.bias), alone) < 1e-13


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_no_rows_make_the_zero_matrix(bias: bool) -> None:
    X, C = torch.empty(0, 5), torch.empty(0, 3)
    V = random_vectors(2, 3, 5 + bias, dtype=torch.float32)
    assert torch.equal(operations.splitting_matvec(X, C, V, bias=bias), torch.zeros_like(V))
    assert torch.equal(operations.splitting_matrices(X, C, bias=bias), torch.zeros(3, 5 + bias, 5 + bias))


def test_no_images_make_the_zero_matrix() -> None:
    V = random_vectors(3, 2 * 9, dtype=torch.float32)
    SV = operations.conv_matvec(torch.empty(0, 2, 5, 5), torch.empty(0, 3, 3, 3), V, kernel_size=(3, 3))
    assert torch.equal(SV, torch.zeros_like(V))


def test_no_clouds_make_the_zero_matrix() -> None:
    V = random_vectors(3, 4, dtype=torch.float32)
    winner = torch.empty(0, 6, 3, dtype=torch.int64)
    assert torch.equal(
        operations.edgeconv_matvec(torch.empty(0, 6, 2), winner, torch.empty(0, 6, 3), V), torch.zeros_like(V)
    )


def test_no_filters_have_no_matrices() -> None:
    assert operations.splitting_matrices(torch.randn(4, 3), torch.empty(4, 0)).shape == (0, 3, 3)
    assert operations.splitting_matvec(torch.randn(4, 3), torch.empty(4, 0), torch.empty(0, 3)).shape == (0, 3)
    points, winner = torch.randn(2, 5, 3), torch.empty(2, 5, 0, dtype=torch.int64)
    assert operations.edgeconv_matvec(points, winner, torch.empty(2, 5, 0), torch.empty(0, 6)).shape == (0, 6)


def test_no_filters_of_a_convolution_have_no_matrices() -> None:
    image, C = torch.randn(2, 2, 5, 5), torch.empty(2, 0, 3, 3)
    assert operations.conv_matvec(image, C, torch.empty(0, 18), kernel_size=(3, 3)).shape == (0, 18)


def strided(tensor: Tensor) -> Tensor:
    """Return an equal tensor with gaps between its entries and its last two dimensions transposed in memory."""
    shape = list(tensor.shape)
    shape[-1], shape[-2] = 2 * shape[-2], 3 * shape[-1]
    buffer = torch.full(shape, torch.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
    view = buffer[..., ::3, 1::2].mT
    view.copy_(tensor)
    assert not view.is_contiguous()
    return view


def test_strides_do_not_matter_to_the_linear_matvec() -> None:
    X, C = RowsCase(13, 5, 4).tensors()
    V = random_vectors(2, 4, 6)
    expected = operations.splitting_matvec(X, C, V, bias=True)
    assert relative_error(operations.splitting_matvec(strided(X), strided(C), strided(V), bias=True), expected) < 1e-13
    assert (
        relative_error(operations.splitting_matrices(strided(X), strided(C)), operations.splitting_matrices(X, C))
        < 1e-13
    )


def test_strides_do_not_matter_to_the_convolution_matvec() -> None:
    case = CONV[1]
    X, C = case.tensors()
    V = random_vectors(2, case.M, case.I * 9 + 1)
    options = {"kernel_size": case.k, **case.geometry, "bias": case.bias}
    expected = operations.conv_matvec(X, C, V, **options)
    assert relative_error(operations.conv_matvec(strided(X), strided(C), strided(V), **options), expected) < 1e-13
    last = X.to(memory_format=torch.channels_last), C.to(memory_format=torch.channels_last)
    assert relative_error(operations.conv_matvec(*last, V, **options), expected) < 1e-13


def test_strides_do_not_matter_to_the_edgeconv_matvec() -> None:
    X, neighbours, slot, C = EDGE[1].tensors()
    winner = neighbours.gather(2, slot)
    V = random_vectors(2, 5, 7)
    expected = operations.edgeconv_matvec(X, winner, C, V, bias=True)
    actual = operations.edgeconv_matvec(strided(X), strided(winner), strided(C), strided(V), bias=True)
    assert relative_error(actual, expected) < 1e-13


def test_the_input_is_left_as_it_was() -> None:
    X, C = RowsCase(13, 5, 4).tensors()
    V = random_vectors(4, 5)
    copies = X.clone(), C.clone(), V.clone()
    operations.splitting_matvec(X, C, V)
    operations.splitting_matrices(X, C)
    assert all(torch.equal(was, now) for was, now in zip(copies, (X, C, V), strict=True))


def test_curvature_coefficients_are_gradient_times_curvature_times_scale_squared() -> None:
    g, z = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)
    expected = -g * torch.sin(z) * torch.tensor([4.0, 9.0, 0.25], dtype=torch.float64)
    sine = Activation("sine", torch.sin, torch.cos, lambda t: -torch.sin(t))
    torch.testing.assert_close(operations.curvature_coefficients(g, z, sine, scale), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(operations.curvature_coefficients(g, z, sine), -g * torch.sin(z), rtol=1e-14, atol=0)
