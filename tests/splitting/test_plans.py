"""Plans, graphs and spectra as people meet them: pickled, printed, and in notebooks."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import s3d_fast as s3d
from s3d_fast.models import MLP


class Named(nn.Module):
    """A network whose layers have hostile names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"<script>": nn.Linear(5, 4), "b&b": nn.Linear(4, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["b&b"](F.silu(self.layers["<script>"](x)))


def planned(model: nn.Module) -> tuple[s3d.SplitPlan, dict[str, s3d.Spectrum]]:
    torch.manual_seed(0)
    x, y = torch.randn(32, 5), torch.randint(2, (32,))
    graph = s3d.trace(model, x)
    spectra = s3d.extremal_eigenpairs(s3d.capture(model, F.cross_entropy, [(x, y)], graph))
    return s3d.select(spectra, graph, fraction=0.5), spectra


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return MLP([5, 4, 4, 2])


def test_a_pickled_plan_grows_another_copy_of_the_model(model: nn.Module) -> None:
    plan, _ = planned(model)
    twin = copy.deepcopy(model)
    there = pickle.loads(pickle.dumps(plan))
    assert str(there) == str(plan)
    assert there.graph.explain() == plan.graph.explain()
    assert there.added() == plan.added()
    s3d.apply_splits(model, plan, eps=0.01)
    s3d.apply_splits(twin, there, eps=0.01)
    grown, other = model.state_dict(), twin.state_dict()
    assert grown.keys() == other.keys()
    assert all(torch.equal(grown[name], other[name]) for name in grown)
    with pytest.raises(ValueError, match="stale or belongs to another model"):
        s3d.apply_splits(twin, there, eps=0.01)


def test_a_pickled_plan_holds_no_model(model: nn.Module) -> None:
    plan, _ = planned(model)
    wide = MLP([5, 64, 64, 2])
    assert len(pickle.dumps(planned(wide)[0].graph.portable())) < 200_000
    there = pickle.loads(pickle.dumps(plan))
    assert there.graph.model is None
    with pytest.raises(ValueError, match=r"that of a pickled plan, .* trace the model again"):
        s3d.capture(model, F.cross_entropy, [(torch.randn(4, 5), torch.zeros(4, dtype=torch.long))], there.graph)


def test_representations_are_short(model: nn.Module) -> None:
    plan, spectra = planned(model)
    graph = plan.graph
    assert repr(graph) == "Graph(2 units of 3 layers; layers.0: 4, layers.2: 4)"
    assert repr(graph.units["layers.0"]) == "Unit('layers.0', linear, 4 channels of 6 parameters, read by layers.2)"
    assert re.fullmatch(r"SplitPlan\(4 splits in \d units, 8 -> 12 channels, loss change .* = -\d\S+\)", repr(plan))
    assert re.fullmatch(r"NeuronSplit\('layers\.\d', neuron \d, weights \S+, \S+, gain -\S+\)", repr(plan.splits[0]))
    assert all(len(repr(one)) < 160 for one in (graph, plan, plan.splits[0], *spectra.values(), *graph))


def test_notebooks_show_tables_and_names_stay_text() -> None:
    plan, spectra = planned(Named())
    for shown in (plan, plan.graph):
        html = shown._repr_html_()
        assert html.startswith("<table>")
        assert "layers.&lt;script&gt;" in html
        assert "<script>" not in html
    html = next(iter(spectra.values()))._repr_html_()
    assert "<td>lambda_min</td>" in html
    assert "4 filters, 4 converged." in html
