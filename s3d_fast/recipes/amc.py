"""AMC (He et al., 2018): an agent chooses, layer by layer, which share of its neurons a network keeps.

The agent is an actor and a critic (deep deterministic policy gradient). A state describes a layer and what was decided
before it; an action is the share of its neurons that stay, those with the largest L1 norms; the reward comes at the end
of the episode, and is the negative loss of the pruned network before any further training. Actions are cut so that the
budget of MACs can always be kept. The paper's agent is the same but wider, with the error as reward, and trains for 400
episodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from s3d_fast.base.losses import batch_loss
from s3d_fast.base.world import ALONE, World
from s3d_fast.network import costs
from s3d_fast.network.graph import Graph
from s3d_fast.network.undisturbed import undisturbed
from s3d_fast.network.wrapping import inside
from s3d_fast.splitting.plan import Removal, SplitPlan
from s3d_fast.splitting.pruning import filter_norms
from s3d_fast.splitting.surgery import mask

Loss = Callable[[Any, Any], Tensor]

# The least share of a layer that an action keeps, and the least number of its neurons.
LEAST, FEWEST = 0.1, 2
# Episodes, those of them that act at random at first, and updates of the agent after each of the others.
EPISODES, RANDOM, UPDATES = 100, 25, 8
# The spread of actions around the actor's at first, by which factor an episode narrows it, and how much is remembered.
SPREAD, NARROWING, MEMORY = 0.4, 0.96, 1024
# Width of the agent's networks, size of its batches, and how fast its targets follow.
HIDDEN, BATCH, FOLLOW = 48, 64, 0.02
FEATURES = 7


def searched_plan(
    model: nn.Module,
    graph: Graph,
    units: Sequence[str],
    budget: float,
    loss_fn: Loss,
    batches: Collection[Any],
    world: World = ALONE,
    episodes: int = EPISODES,
) -> SplitPlan:
    """Return the removal of neurons that the agent has found best, within a budget of MACs.

    The first episode keeps the same share of every layer, so that the result is at least as good as that. The search
    takes one evaluation of the batches per episode; in several processes, all of them judge by the batches of all.

    Raises:
        ValueError: the budget cannot be reached.
    """
    environment = _Environment(model, graph, units, budget)
    seed = world.same(int(torch.randint(2**62, ())))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        agent = _Agent()
        best: tuple[float, SplitPlan] | None = None
        for episode in range(episodes):
            steps: list[tuple[Tensor, float]] = []
            kept: dict[str, int] = {}
            for name in environment.names:
                state = environment.state(kept, steps[-1][1] if steps else 1.0)
                action = environment.uniform if episode == 0 else agent.action(state, episode)
                kept[name] = environment.allowed(kept, name, action)
                # What was really done, after the cut.
                steps.append((state, kept[name] / graph.units[name].width))
            plan = environment.plan(kept)
            loss = masked_loss(model, plan, loss_fn, batches, world)
            if best is None or loss < best[0]:
                best = (loss, plan)
            agent.remember(steps, -loss)
            if episode >= RANDOM:
                for _ in range(UPDATES):
                    agent.learn()
    assert best is not None
    return best[1]


@torch.no_grad()
def masked_loss(
    model: nn.Module, plan: SplitPlan, loss_fn: Loss, batches: Collection[Any], world: World = ALONE
) -> float:
    """Return the mean loss on the batches of all processes if nothing is read from the neurons that a plan removes."""
    trial = copy.deepcopy(inside(model))
    mask(trial, plan)

    def own() -> float:
        with undisturbed(trial):
            return sum(float(batch_loss(trial, loss_fn, batch)) for batch in batches)

    total, count = world.sum(world.together(own), len(batches))
    return total / count


class _Environment:
    """The layers in order, what they cost, and what may still be kept of them."""

    def __init__(self, model: nn.Module, graph: Graph, units: Sequence[str], budget: float) -> None:
        self.graph, self.budget = graph, budget
        scores = filter_norms(model, graph)
        self.order = {name: scores[name].argsort(stable=True).tolist() for name in graph.units if name in units}
        self.names = list(self.order)
        self.widths = graph.widths()
        self.least = {name: self._at_least(name) for name in self.names}
        self.full, self.prices = costs.count(graph).macs, costs.marginal(graph)
        if not self.names or self._macs({}) > budget:
            raise ValueError(
                f"budget: with {LEAST:.0%} of every layer the network still has {self._macs({}):.6g} MACs, more than "
                f"{budget:.6g}; prune to a larger share"
            )
        self.uniform = self._uniform()

    def _at_least(self, name: str) -> int:
        width = self.widths[name]
        return min(width, max(FEWEST, round(LEAST * width)))

    def _macs(self, kept: Mapping[str, int]) -> float:
        """Return the MACs if these layers keep so many neurons, and all layers after them as few as they may."""
        return costs.count(self.graph, {**self.widths, **self.least, **kept}).macs

    def _uniform(self) -> float:
        """Return the largest share that all layers can keep."""
        low, high = 0.0, 1.0
        for _ in range(30):
            share = (low + high) / 2
            kept = {name: max(self.least[name], round(share * self.widths[name])) for name in self.names}
            low, high = (share, high) if self._macs(kept) <= self.budget else (low, share)
        return low

    def allowed(self, kept: Mapping[str, int], name: str, share: float) -> int:
        """Return how many neurons of a layer stay: a share of them, or as many as leave the budget within reach."""
        low, high = self.least[name], max(self.least[name], min(self.widths[name], round(share * self.widths[name])))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._macs({**kept, name: middle}) <= self.budget else (low, middle - 1)
        return low

    def state(self, kept: Mapping[str, int], last: float) -> Tensor:  # (FEATURES,)
        """Return the description of the next layer, after decisions about those before it; all entries about 1."""
        place = len(kept)
        unit = self.graph.units[self.names[place]]
        widest = max(self.graph.units[name].width for name in self.names)
        longest = max(self.graph.units[name].fan_in for name in self.names)
        own = self.prices[unit.name].macs * unit.width / self.full
        spent = costs.count(self.graph, {**self.widths, **kept}).macs / self.full
        rest = (self.budget - self._macs(kept)) / self.full
        position = place / len(self.names)
        return torch.tensor([position, unit.width / widest, unit.fan_in / longest, own, spent, rest, last])

    def plan(self, kept: Mapping[str, int]) -> SplitPlan:
        """Return the removal of all but so many neurons of every layer, those with the smallest norms first."""
        gone = [
            Removal(name, neuron, float(place))
            for name, count in kept.items()
            for place, neuron in enumerate(self.order[name][: self.widths[name] - count])
        ]
        return SplitPlan(self.graph, (), removed=gone)


@dataclass(frozen=True)
class _Step:
    """A state, the action in it, the reward, and the next state; None at the end."""

    state: Tensor
    action: float
    reward: float
    after: Tensor | None


class _Agent:
    """Actor and critic, their slow copies, and what they remember."""

    def __init__(self) -> None:
        self.actor, self.critic = _network(FEATURES, nn.Sigmoid()), _network(FEATURES + 1, nn.Identity())
        self.slow_actor, self.slow_critic = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.by_actor = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.by_critic = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        self.memory: list[_Step] = []
        # Rewards are seen relative to the first ones, in units of their spread.
        self.rewards: list[float] = []

    @torch.no_grad()
    def action(self, state: Tensor, episode: int) -> float:
        """Return the share to keep: at random at first, then the actor's with noise that fades."""
        if episode < RANDOM:
            return LEAST + (1 - LEAST) * float(torch.rand(()))
        noise = SPREAD * NARROWING ** (episode - RANDOM) * float(torch.randn(()))
        return min(1.0, max(LEAST, float(self.actor(state)) + noise))

    def remember(self, steps: Sequence[tuple[Tensor, float]], reward: float) -> None:
        """Add an episode; its reward comes with its last step."""
        self.rewards.append(reward)
        for place, (state, action) in enumerate(steps):
            is_last = place + 1 == len(steps)
            self.memory.append(
                _Step(state, action, reward if is_last else 0.0, None if is_last else steps[place + 1][0])
            )
        del self.memory[:-MEMORY]

    def learn(self) -> None:
        """Make one step of critic and actor on steps drawn from memory."""
        drawn = [self.memory[place] for place in torch.randint(len(self.memory), (BATCH,)).tolist()]
        states = torch.stack([step.state for step in drawn])
        actions = torch.tensor([[step.action] for step in drawn])
        first = torch.tensor(self.rewards[:RANDOM])
        middle, spread = float(first.median()), float(first.std(correction=0)) or 1.0
        with torch.no_grad():
            after = torch.stack([step.state if step.after is None else step.after for step in drawn])
            value = self.slow_critic(torch.cat([after, self.slow_actor(after)], 1))
            ends = torch.tensor([[step.after is None] for step in drawn])
            reward = torch.tensor([[(step.reward - middle) / spread] for step in drawn]).clamp(-3, 3)
            wanted = torch.where(ends, reward, value)
        self.by_critic.zero_grad()
        nn.functional.mse_loss(self.critic(torch.cat([states, actions], 1)), wanted).backward()
        self.by_critic.step()
        self.by_actor.zero_grad()
        (-self.critic(torch.cat([states, self.actor(states)], 1)).mean()).backward()
        self.by_actor.step()
        with torch.no_grad():
            for slow, fast in ((self.slow_actor, self.actor), (self.slow_critic, self.critic)):
                for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
                    old.lerp_(new, FOLLOW)


def _network(inputs: int, last: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1), last
    )
