"""Proof by execution: the graph is compared with the model, and every unit is split on trial and undone.

Python code can depend on sizes in ways that no graph shows: a size attribute that is read in `forward`, a hook, a view
with a number written into it. So nothing is claimed that the model itself has not shown.

The trial works on the model's own modules, with other tensors in their place: close to the model's own, in float64
where the model can compute in it, and with noise where they are zero, since a branch that is multiplied by zero would
hide what is wrong in it. Some channels of every unit are split into three copies: two equal ones that share the weight
of the original, and one that differs and is read with weight zero. Nothing of that may be seen in the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from s3d_fast.backends.operations import grow_weights
from s3d_fast.base.random_state import same_random_numbers
from s3d_fast.network.execution import Execution
from s3d_fast.network.export import Exported, slow_attention, takes
from s3d_fast.network.graph import SHARED, Filters, Graph, Unit, holders_of, stored_tensors
from s3d_fast.network.growing import Copies, Growth, Shift, regrown, widening
from s3d_fast.network.sizes import fitting_sizes
from s3d_fast.network.undisturbed import set_training
from s3d_fast.network.undo import AllOrNothing, set_size
from s3d_fast.network.units import Analysis
from s3d_fast.network.wrapping import arguments_of

# The largest change of an output, relative to its largest entry, that counts as rounding.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# The same where code computes in float32 on the way, as many norms do, and for a graph that has dtypes written into it.
IN_BETWEEN = 1e-4
# The share of channels that are split on trial.
SHARE = 0.1
# Parameters whose root mean square is smaller hide what they multiply: the trial gives them noise instead.
DEAD, NOISE = 1e-3, 0.05
# By how much the parameters are smaller for the second example.
SMALLER = 0.25


def proved(model: nn.Module, program: Exported, analysis: Analysis) -> Graph:
    """Return the graph with only those units whose splits leave the model's output as it was.

    Raises:
        ValueError: the graph computes something else than the model.
    """
    graph = analysis.graph()
    with AllOrNothing(model.modules()) as undo, torch.no_grad(), slow_attention():
        try:
            trial = _Trial(model, program, graph)
            trial.compare_graph()
            refused = trial.refused() if graph.units else {}
        finally:
            undo.undo()
    return analysis.graph(refused) if refused else graph


def outputs_of(model: nn.Module, example_input: Any) -> list[Tensor]:
    """Return the tensors that a model computes for an example input, as given to `trace`."""
    arguments, keywords = arguments_of(model, example_input)
    with same_random_numbers():
        return _tensors(model(*_copied(arguments), **_copied(keywords)))


def output_tolerance(outputs: Sequence[Tensor]) -> float:
    """Return the largest change of outputs that counts as rounding."""
    return max((TOLERANCE.get(one.dtype, 1e-3) for one in outputs if one.is_floating_point()), default=0.0)


@dataclasses.dataclass(frozen=True)
class _Example:
    """Arguments, the tensors that the model has, and what it computes with them."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    values: Mapping[int, Tensor]
    outputs: list[Tensor]


class _Trial:
    """Evaluates the model before and after trial splits, on examples of two sizes."""

    def __init__(self, model: nn.Module, program: Exported, graph: Graph) -> None:
        self.model, self.program, self.graph = model, program, graph
        self.generator = torch.Generator().manual_seed(0)
        self.random = np.random.default_rng(0)
        self.names = {name: tensor for name, tensor in stored_tensors(model).items()}
        self.holders = holders_of(model)
        self.originals = {id(tensor): tensor for tensor in self.names.values()}
        self.values: dict[int, Tensor] = dict(self.originals)
        self.dtype: torch.dtype | None = None
        try:
            self.is_small = True
            self._start(_first_samples(program, 2))
        except Exception:
            # The first dimension may be no batch, as in a graph of nodes and edges.
            self.is_small = False
            self._start((program.arguments, program.keywords))
        self.examples = [_Example(self.example[0], self.example[1], self.values, self.first)]
        self._add_other_size()
        self.trains: bool | None = None
        self.rounds = any(_has_float_type(node) for node in program.module.graph.nodes)

    def _start(self, example: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Choose the values of the trial: in float64 and with noise if the model can compute with them."""
        for dtype, noisy in ((torch.float64, True), (None, True), (None, False)):
            self.dtype = dtype
            self.values = {key: self._value(tensor, dtype, noisy) for key, tensor in self.originals.items()}
            self._write(self.values)
            self.example = self._alive(_cast(example, dtype)) if noisy else _cast(example, dtype)
            try:
                self.first = self._evaluate(*self.example)
            except Exception:
                if not noisy:
                    raise
                continue
            if _is_sound(self.first) or not noisy:
                return

    def _value(self, tensor: Tensor, dtype: torch.dtype | None, noisy: bool) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        value = tensor.detach().to(dtype or tensor.dtype)
        if noisy and isinstance(tensor, nn.Parameter) and tensor.numel():
            size = float(value.double().square().mean().sqrt())
            noise = torch.randn(value.shape, generator=self.generator, dtype=torch.float64).to(value)
            value = NOISE * noise if size < DEAD else value + 0.1 * size * noise
        return value

    def _alive(self, example: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the example with noise in place of tensors that are constant: zeros would hide everything."""

        def alive(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.numel() < 2:
                return leaf
            if float(leaf.double().std()) > DEAD:
                return leaf
            return leaf + torch.randn(leaf.shape, generator=self.generator, dtype=torch.float64).to(leaf)

        return pytree.tree_map(alive, example)

    def _write(self, values: Mapping[int, Tensor]) -> None:
        for key, value in values.items():
            for table, name, _ in self.holders.get(key, ()):
                is_parameter = isinstance(self.originals[key], nn.Parameter)
                # A forward pass may write into buffers: they get a copy.
                table[name] = nn.Parameter(value, requires_grad=False) if is_parameter else value.clone()

    def _evaluate(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Tensor]:
        before = torch.get_default_dtype()
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)
        try:
            with same_random_numbers():
                return _tensors(self.model(*_copied(arguments), **_copied(keywords)))
        finally:
            torch.set_default_dtype(before)

    def _add_other_size(self) -> None:
        """Add an example of another batch size and, where the model takes it, of another spatial size."""
        if self.program.batch is None:
            return
        batch = min(self.program.batch, 2) if self.is_small else self.program.batch
        # Smaller parameters, so that what saturates for one example does not for the other.
        smaller = {
            key: SMALLER * value
            if isinstance(self.originals[key], nn.Parameter) and value.is_floating_point()
            else value
            for key, value in self.values.items()
        }
        for change in (_smaller, lambda tensor: tensor):
            for values in (smaller, self.values):
                other = _resized(self.example, batch, change)
                self._write(values)
                try:
                    found = self._evaluate(*other)
                except Exception:
                    break
                if _is_sound(found):
                    self.examples.append(_Example(*other, values, found))
                    self._write(self.values)
                    return
        self._write(self.values)

    def _fails_in_training(self) -> Exception | None:
        """Return the error of the split model in training mode, if it has one; buffers are copies and may change.

        The values are computed too: torch's way to compute shapes alone takes longer where there are BatchNorms.
        """
        set_training(self.model, True)
        try:
            self._evaluate(*self.example)
        except Exception as error:
            return error
        finally:
            set_training(self.model, False)
        return None

    def compare_graph(self) -> None:
        """Raise ValueError unless the graph computes what the model computes."""
        example, tolerance = self.examples[0], max(self._tolerance(), IN_BETWEEN)
        wanted = example.outputs
        found = self._graph_outputs(example.arguments, example.keywords)
        if found is None:
            # Types or sizes are written into the graph: compare with the model's own tensors, on the whole example.
            self._write(self.originals)
            whole = (self.program.arguments, self.program.keywords)
            wanted = self._own_outputs(whole)
            with same_random_numbers():
                found = _tensors(Execution(self.program.module, self.model).run(*_flat(*whole)))
            tolerance = max(output_tolerance(wanted), IN_BETWEEN)
            self._write(self.values)
        # Whole numbers may depend on the last bit, which types that are written into the graph change.
        pairs = [(a, b) for a, b in zip(wanted, found, strict=False) if a.is_floating_point() or a.is_complex()]
        change = output_change([a for a, _ in pairs], [b for _, b in pairs])
        if len(wanted) != len(found) or not change <= tolerance:
            raise ValueError(
                f"torch.export's graph of the model computes something else than the model: outputs differ by "
                f"{change:.2g} of their size. Does the code ask for a tensor's type, or for random numbers?"
            )

    def _own_outputs(self, example: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
        with same_random_numbers():
            return _tensors(self.model(*_copied(example[0]), **_copied(example[1])))

    def _graph_outputs(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Tensor] | None:
        """Return what the graph computes with the tensors of the trial; None if it cannot."""
        inputs = _flat(arguments, keywords)
        if not takes(self.program.module, inputs):
            return None
        run = _Substituted(self.program.module, self.model, self.values, self.dtype)
        try:
            with same_random_numbers():
                return _tensors(run.run(*inputs))
        except Exception:
            return None

    def _tolerance(self) -> float:
        found = output_tolerance(self.examples[0].outputs)
        return max(found, IN_BETWEEN) if self.rounds else found

    def refused(self) -> dict[str, str]:
        """Return the units that cannot be split, each with the reason: found by halving."""
        accepted: list[Unit] = []
        refused: dict[str, str] = {}

        def add(units: Sequence[Unit]) -> None:
            problem = self._problem([*accepted, *units])
            if problem is None:
                accepted.extend(units)
            elif len(units) == 1:
                refused[units[0].name] = problem
            else:
                half = len(units) // 2
                add(units[:half])
                add(units[half:])

        add(list(self.graph))
        return refused

    def _problem(self, units: Sequence[Unit]) -> str | None:
        """Return what is wrong if these units are split; None if nothing is."""
        if not units:
            return None
        with AllOrNothing(self.model.modules()) as undo:
            try:
                copies = {unit.name: self._copies(unit) for unit in units}
                for example in reversed(self.examples):
                    undo.undo()
                    self._write(example.values)
                    self._split(units, copies, example.values)
                    change = output_change(example.outputs, self._evaluate(example.arguments, example.keywords))
                    if not change <= self._tolerance():
                        return f"splitting it changes the output by {change:.2g} of its size"
                error = self._fails_in_training()
                if error is not None and self._trains():
                    uses = f", where it also uses {', '.join(self.graph.unused[:3])}" if self.graph.unused else ""
                    return f"after a split the model fails in training{uses}: {_line(error)}"
            except Exception as error:
                return f"after a split the model fails: {_line(error)}"
            finally:
                undo.undo()
        return None

    def _trains(self) -> bool:
        """Return whether the model that is not split can be evaluated in training mode."""
        if self.trains is None:
            with AllOrNothing(self.model.modules()) as undo:
                self._write(self.values)
                self.trains = self._fails_in_training() is None
                undo.undo()
        return self.trains

    def _split(self, units: Sequence[Unit], copies: Mapping[str, Copies], values: Mapping[int, Tensor]) -> None:
        shifts: dict[str, Filters] = {}
        growth = Growth(self.graph, copies)
        for number, unit in enumerate(self.graph):
            # Where copies share a number, as in the metric of EdgeConv, they must be equal to leave the output alone.
            if unit in units and not self._is_shared(number):
                shifts |= {one.weight: one for one in unit.filters}
        touched: dict[nn.Module, None] = {}
        for name, axes in growth.tensors().items():
            key = id(self.names[name])
            value, mover = values[key], shifts.get(name)
            shift, row_axis = None, None
            if mover is not None and mover.row_axis in axes:
                row_axis = mover.row_axis
                shift = self._shift(value, row_axis, axes[row_axis].index)
            made = widening(value, axes, row_axis, shift)
            grown = regrown(grow_weights([made])[0], axes, row_axis)
            for table, entry, module in self.holders[key]:
                is_parameter = isinstance(self.originals[key], nn.Parameter)
                table[entry] = nn.Parameter(grown, requires_grad=False) if is_parameter else grown
                touched[module] = None
        for module in touched:
            for attribute, size in fitting_sizes(module).items():
                set_size(module, attribute, size)

    def _is_shared(self, number: int) -> bool:
        layouts = [layout for axes in self.graph.tensors.values() for layout in axes.values()]
        return any(bool(((layout.unit == number) & (layout.role == SHARED)).any()) for layout in layouts)

    def _copies(self, unit: Unit) -> Copies:
        count = np.ones(unit.width, np.int64)
        # The first and the last channel, and some between them.
        between = 1 + self.random.permutation(max(0, unit.width - 2))
        count[[0, unit.width - 1, *between[: round(SHARE * unit.width)]]] = 3
        # Units of equal width grow by different amounts, in case code compares them.
        count[0] += 2 * (list(self.graph.units).index(unit.name) % 3)
        weight = []
        for copies in count.tolist():
            share = float(self.random.uniform(0.3, 0.7))
            weight += [1.0] if copies == 1 else [share, 1 - share, *[0.0] * (copies - 2)]
        return Copies(count, np.array(weight))

    def _shift(self, value: Tensor, axis: int, index: np.ndarray) -> Shift:
        """Return a change of the third copy of every row that has three."""
        again = np.concatenate([[False], index[1:] == index[:-1]])
        third = again & np.concatenate([[False], again[:-1]])
        which = np.where(third, np.cumsum(third) - 1, -1)
        rows = list(value.shape)
        rows[axis] = max(1, int(third.sum()))
        size = float(value.double().square().mean().sqrt())
        noise = torch.randn(rows, generator=self.generator, dtype=torch.float64).to(value)
        return Shift(0.5 * size * noise, which, 1.0)


class _Substituted(Execution):
    """Evaluates the graph with other tensors, perhaps of another dtype, in place of the model's."""

    def __init__(
        self, module: fx.GraphModule, model: nn.Module, values: Mapping[int, Tensor], dtype: torch.dtype | None
    ) -> None:
        super().__init__(module, model)
        self.values, self.dtype = values, dtype

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, Tensor):
            value = self.values.get(id(value), value)
            if self.dtype is not None and value.is_floating_point():
                value = value.to(self.dtype)
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if str(getattr(target, "__name__", "")).startswith("_assert"):
            return None
        if self.dtype is not None:
            kwargs = {key: self._longer(value) for key, value in kwargs.items()}
            args = tuple(self._longer(value) for value in args)
        return super().call_function(target, args, kwargs)

    def _longer(self, value: Any) -> Any:
        is_float = isinstance(value, torch.dtype) and value.is_floating_point
        return self.dtype if is_float else value


def _has_float_type(node: fx.Node) -> bool:
    """Return whether a call names a type of floating-point numbers that is shorter than float64."""
    given = [*node.args, *node.kwargs.values()]
    return any(one in (torch.float32, torch.float16, torch.bfloat16) for one in given if isinstance(one, torch.dtype))


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def output_change(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the largest difference of two lists of outputs, relative to the size of each.

    Numbers that are not finite must be the same ones. Whole numbers count as changed where more than one in a hundred
    differs: rounding may move a few.
    """
    if len(wanted) != len(found):
        return float("inf")
    return max((_difference(a, b) for a, b in zip(wanted, found, strict=True)), default=0.0)


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        share = float((a != b).double().mean())
        return share if share > 0.01 else 0.0
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return float("inf")
    a, b = a[finite], b[finite]
    if not a.numel():
        return 0.0
    size, difference = float(a.abs().max()), float((a - b).abs().max())
    return difference / size if size > 0 else difference


def _is_sound(outputs: Sequence[Tensor]) -> bool:
    """Return whether outputs hold no NaN, and some number that is finite."""
    return all(
        not bool(torch.isnan(one).any()) and (not one.numel() or bool(torch.isfinite(one).any())) for one in outputs
    )


def _tensors(output: Any) -> list[Tensor]:
    """Return all tensors of an output: of tuples, dicts and dataclasses."""
    if isinstance(output, Tensor):
        return [output.to_dense() if output.layout is not torch.strided else output]
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in _tensors(value)]
    if isinstance(output, (tuple, list)):
        return [tensor for value in output for tensor in _tensors(value)]
    if dataclasses.is_dataclass(output):
        return [t for field in dataclasses.fields(output) for t in _tensors(getattr(output, field.name))]
    return []


def _copied(tree: Any) -> Any:
    """Return arguments that the model may write over."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def _cast(
    example: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(leaf: Any) -> Any:
        is_float = dtype is not None and isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return pytree.tree_map(cast, example)


def _first_samples(program: Exported, count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = program.batch

    def first(leaf: Any) -> Any:
        is_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and batch is not None and leaf.shape[0] == batch
        return leaf[:count] if is_batch else leaf

    return pytree.tree_map(first, (program.arguments, program.keywords))


def _resized(
    example: tuple[tuple[Any, ...], dict[str, Any]], batch: int, change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example with one more sample, and every tensor changed by a function."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != batch:
            return leaf
        more = leaf[:1]
        if leaf.is_floating_point():
            # Another operating point than those of the example.
            more = 0.3 * leaf.flip(0)[:1] - 0.5 * leaf[:1]
        return change(torch.cat([leaf, more]))

    return pytree.tree_map(resize, example)


def _smaller(tensor: Tensor) -> Tensor:
    """Return feature maps of three quarters the size; other tensors as they are."""
    if tensor.dim() < 4 or not tensor.is_floating_point():
        return tensor
    for axis in range(2, tensor.dim()):
        length = tensor.shape[axis]
        tensor = tensor.narrow(axis, 0, max(1, length * 3 // 4))
    return tensor


def _flat(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
    """Return the arguments in the form in which the graph's interpreter takes them."""
    return [*_copied(arguments), *_copied(list(keywords.values()))]
