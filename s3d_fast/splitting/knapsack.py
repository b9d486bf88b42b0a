"""The selection programme: find the candidates that gain the most within a budget, with scipy's HiGHS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array

from s3d_fast.splitting.quiet import quiet

# Branch and bound stops after this many seconds, with the best choice so far. For large budgets over wide networks it
# may stop before it has proved the optimum; the choice may then depend on the speed of the machine.
TIME_LIMIT = 20.0


@dataclass(frozen=True)
class Knapsack:
    """The choice of candidates with the most negative sum of gains within a budget, at most one per neuron.

    If unit u grows by G_u filters, the cost is  sum_u price[u] G_u + sum_(u,v) cross[u, v] G_u G_v .  The products
    appear because the number of weights between two units is the product of their widths. The removal of a neuron is a
    candidate that adds -1 filter, with a positive gain; what it saves may pay for others. The budget may be negative.
    """

    gain: np.ndarray  # (n,), the change of the loss
    neuron: np.ndarray  # (n,), the neuron that a candidate changes: 0, 1, ...
    unit: np.ndarray  # (n,), the unit of that neuron
    extra: np.ndarray  # (n,), the number of filters that a candidate adds; -1 if it removes one
    price: np.ndarray  # (units,)
    cross: Mapping[tuple[int, int], float]
    cap: np.ndarray  # (units,), the most filters that a unit may grow by; may be infinite

    def cost(self, chosen: np.ndarray) -> float:
        """Return the cost of a choice."""
        growth = np.bincount(self.unit[chosen], self.extra[chosen], minlength=len(self.price))
        pairs = sum(value * growth[u] * growth[v] for (u, v), value in self.cross.items())
        return float(self.price @ growth + pairs)

    def exact(self, budget: float) -> np.ndarray | None:
        """Return the best choice by integer programming; None if HiGHS finds no choice within its limits.

        If all candidates add the same number of filters, the best choice of a given size in a unit is a prefix of its
        candidates, sorted by gain. Then only the sizes need to be integers, one per unit.

        A product of growths K_u K_v is written as sum_b 2^b z_b with the bits y_b of K_u, z_b >= 0 and
        z_b >= K_v - most_v (1 - y_b), where most_v bounds K_v. These constraints are linear. They are exact where the
        budget binds, because a larger z_b only costs more. Where r_u neurons may be removed, K_u = r_u + G_u takes the
        place of the growth G_u, which may be negative: G_u G_v = K_u K_v - r_v K_u - r_u K_v + r_u r_v.
        """
        uniform = bool((self.extra == self.extra[0]).all()) and self.extra[0] > 0
        unit_of_growth = self.extra[0] if uniform else 1.0
        growth = self.extra / unit_of_growth
        programme = _Programme()
        choice = programme.variables(len(self.gain), self._objective(), integer=not uniform, most=1.0)
        if not uniform:
            self._one_per_neuron(programme, choice)
        removable = self.removable()
        most = self._caps(programme, choice, unit_of_growth) / unit_of_growth + removable
        members = [np.flatnonzero(self.unit == u) for u in range(len(self.price))]
        bits: dict[int, list[int]] = {}
        for u in range(len(self.price)):
            if most[u] > 0 and (uniform or any(u == first for first, _ in self.cross)):
                bits[u] = programme.variables(int(most[u]).bit_length(), 0.0, integer=True, most=1.0)
                # The bits are the binary digits of the unit's growth.
                row = {bit: -float(2**b) for b, bit in enumerate(bits[u])}
                shift = -float(removable[u])
                programme.row(row | {choice[j]: growth[j] for j in members[u]}, shift, shift)
        cost = {variable: self.price[self.unit[j]] * self.extra[j] for j, variable in enumerate(choice)}
        constant = 0.0
        for (u, v), value in self.cross.items():
            if most[u] == 0 or most[v] == 0:
                continue
            for b, bit in enumerate(bits[u]):
                (z,) = programme.variables(1, 0.0, integer=False, most=float(most[v]))
                row = {choice[j]: growth[j] for j in members[v]}
                upper = float(most[v] - removable[v])
                programme.row({**row, z: -1.0, bit: float(most[v])}, -np.inf, upper)
                cost[z] = value * unit_of_growth**2 * 2**b
            for own, other in ((u, v), (v, u)):
                for j in members[own]:
                    cost[choice[j]] -= value * removable[other] * self.extra[j]
            constant -= value * removable[u] * removable[v]
        # Rows are scaled so that the solver's absolute tolerances are relative to the budget.
        scale = max(abs(budget), float(np.abs(self.price).max()))
        programme.row(
            {variable: price / scale for variable, price in cost.items()}, -np.inf, (budget - constant) / scale
        )
        solution = programme.solve()
        if solution is None:
            return None
        if not uniform:
            return np.flatnonzero(solution[choice] > 0.5)
        # The solution may hold fractions of candidates with equal gains: take whole candidates, the first ones first.
        chosen = []
        for mine in members:
            size = round(float(solution[choice][mine].sum()))
            chosen.append(mine[np.argsort(self.gain[mine], kind="stable")[:size]])
        return np.sort(np.concatenate(chosen))

    def relaxed(self, budget: float) -> np.ndarray | None:
        """Return the solution of the linear relaxation without cross terms, rounded down, as in the paper."""
        programme = _Programme()
        choice = programme.variables(len(self.gain), self._objective(), integer=False, most=1.0)
        self._one_per_neuron(programme, choice)
        self._caps(programme, choice)
        scale = max(abs(budget), float(np.abs(self.price).max()))
        costs = self.price[self.unit] * self.extra / scale
        programme.row(dict(zip(choice, costs, strict=True)), -np.inf, budget / scale)
        solution = programme.solve()
        if solution is None:
            if (self.extra < 0).any():
                return None
            raise RuntimeError("HiGHS found no solution of the relaxed selection programme")
        # A removal must be whole before it pays for anything: round those up.
        is_removal = self.extra < 0
        return np.flatnonzero((solution[choice] > 1 - 1e-6) | (is_removal & (solution[choice] > 1e-6)))

    def removable(self) -> np.ndarray:
        """Return, for every unit, how many neurons may be removed."""
        return np.bincount(self.unit, self.extra < 0, minlength=len(self.price))

    def _objective(self) -> np.ndarray:
        # Gains are scaled so that the solver's absolute tolerances are relative to the largest gain.
        return self.gain / (np.abs(self.gain).max() or 1.0)

    def _one_per_neuron(self, programme: _Programme, choice: list[int]) -> None:
        rows: dict[int, dict[int, float]] = {}
        for j, neuron in enumerate(self.neuron):
            rows.setdefault(int(neuron), {})[choice[j]] = 1.0
        for row in rows.values():
            programme.row(row, -np.inf, 1.0)

    def _caps(self, programme: _Programme, choice: list[int], step: float = 1.0) -> np.ndarray:
        """Add the caps, rounded down to multiples of `step`; return the most filters that each unit can grow by.

        A unit that grows in steps of three cannot grow by two: without rounding, the programme would take two thirds of
        a candidate.
        """
        most = np.zeros(len(self.price))
        for u in range(len(self.price)):
            mine = np.flatnonzero(self.unit == u)
            largest: dict[int, float] = {}
            for j in mine:
                largest[self.neuron[j]] = max(largest.get(self.neuron[j], 0.0), float(self.extra[j]), 0.0)
            most[u] = min(sum(largest.values()), self.cap[u]) // step * step
            if most[u] < sum(largest.values()):
                programme.row({choice[j]: float(self.extra[j]) for j in mine}, -np.inf, float(most[u]))
        return most


class _Programme:
    """A mixed-integer linear programme, built row by row."""

    def __init__(self) -> None:
        self.objective: list[float] = []
        self.integer: list[bool] = []
        self.most: list[float] = []
        self.entries: list[tuple[int, int, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def variables(self, count: int, objective: np.ndarray | float, *, integer: bool, most: float) -> list[int]:
        """Add variables between 0 and `most`; return their indices."""
        start = len(self.objective)
        self.objective += np.broadcast_to(objective, count).tolist()
        self.integer += [integer] * count
        self.most += [most] * count
        return list(range(start, start + count))

    def row(self, row: Mapping[int, float], lower: float, upper: float) -> None:
        """Add lower <= sum of row[i] x_i <= upper."""
        self.entries += [(len(self.lower), column, value) for column, value in row.items() if value != 0]
        self.lower.append(lower)
        self.upper.append(upper)

    def solve(self) -> np.ndarray | None:
        """Return the minimiser, or the best point found within the limits; None if no point was found."""
        rows, columns, values = (np.array(part) for part in zip(*self.entries, strict=True))
        shape = (len(self.lower), len(self.objective))
        matrix = coo_array((values, (rows.astype(int), columns.astype(int))), shape=shape).tocsr()
        if any(self.integer):
            # HiGHS prints a line when it repairs a solution that violates a row by rounding; no option turns that off.
            with quiet():
                result = milp(
                    self.objective,
                    constraints=LinearConstraint(matrix, np.array(self.lower), np.array(self.upper)),
                    integrality=np.array(self.integer, dtype=np.int64),
                    bounds=Bounds(0, np.array(self.most)),
                    options={"mip_rel_gap": 0.0, "time_limit": TIME_LIMIT},
                )
        else:
            result = linprog(
                self.objective, A_ub=matrix, b_ub=self.upper, bounds=np.array([(0, most) for most in self.most])
            )
        return None if result.x is None else np.asarray(result.x)
