"""The time of S v by shape, for every backend that is there, against the reference and against a matrix product."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from s3d_fast import reference
from s3d_fast.ops import splitting_matvec
from tests.cases import LARGE_ROWS, TOLERANCE, RowsCase, random_vectors, relative_error


@pytest.mark.parametrize("case", LARGE_ROWS, ids=str)
@pytest.mark.parametrize("what", ["sgemm", "reference", "auto"])
def test_splitting_matvec(benchmark: BenchmarkFixture, case: RowsCase, what: str) -> None:
    X, C = case.tensors()
    V = random_vectors(case.M, case.D, dtype=case.dtype)
    benchmark.group = str(case)
    if what == "sgemm":
        # As many flops as S v has in its two products, in the shape of the first.
        A, B = torch.cat([X, X]), V.T.contiguous()
        benchmark.pedantic(torch.mm, (A, B), rounds=10, iterations=1, warmup_rounds=2)
        return
    if what == "reference":
        benchmark.pedantic(reference.splitting_matvec, (X, C, V), rounds=10, iterations=1, warmup_rounds=2)
        return
    assert relative_error(splitting_matvec(X, C, V), reference.splitting_matvec(X, C, V)) <= TOLERANCE[case.dtype]
    options = {"check_finite": False}
    benchmark.pedantic(splitting_matvec, (X, C, V), options, rounds=10, iterations=1, warmup_rounds=2)
