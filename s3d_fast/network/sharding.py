"""Models whose parameters `fully_shard` (FSDP2) has divided between processes: made whole, and divided again.

All processes must call these functions: parameters are gathered from all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from s3d_fast.network.undo import AllOrNothing

# What a user may have set on a group of parameters after `fully_shard`, besides its arguments.
_SETTINGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "gradient_divide_factor",
    "reduce_scatter_unused_params",
    "force_sum_reduction_for_comms",
    "unshard_async_op",
    "unshard_in_backward",
)


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` has divided a model, or a part of it."""
    return any(_is_divided(module) for module in model.modules())


def unsharded(model: nn.Module) -> nn.Module:
    """Return a copy of a model that `fully_shard` has divided, with whole parameters, as it was before.

    Gradients are not copied. Every process must call this: the parameters are gathered from all of them, and each gets
    the whole model.
    """
    with whole(model):
        return copy.deepcopy(model)


def gather_into(copied: nn.Module, model: nn.Module) -> None:
    """Write the values of a model that `fully_shard` has divided into a whole copy of it, made by `unsharded`.

    Raises:
        ValueError: the copy has other tensors, or tensors of other shapes.
    """
    mine = copied.state_dict(keep_vars=True)
    with whole(model), torch.no_grad():
        given = model.state_dict()
        if {name: tensor.shape for name, tensor in mine.items()} != {name: one.shape for name, one in given.items()}:
            raise ValueError("graph is stale or belongs to another model: it has other tensors; trace the model again")
        for name, tensor in mine.items():
            # Write only if the values differ: operators that read the copy again count every write as a change.
            if not torch.equal(tensor, given[name]):
                tensor.copy_(given[name])


@contextmanager
def whole(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Give a model that `fully_shard` has divided whole parameters within the `with` block, in place.

    Parameters that the block replaces are divided afterwards, as the model was before, and the optimizer then holds the
    new parts. If the block replaces none, or raises an error, everything is as before. Values that it writes into
    whole parameters are lost. A model that is not divided stays as it is.

    Args:
        model: the model, without wrappers.
        optimizer: the optimizer of its parameters; within the block it holds the whole ones, with whole state.

    Raises:
        ValueError: the way in which the model is divided cannot be repeated, and the block has replaced parameters.
    """
    if not is_sharded(model):
        yield
        return
    from torch.distributed import _composable_state

    modules = list(model.modules())
    classes = {module: type(module) for module in modules if _is_divided(module)}
    for module in classes:
        # Parameters that a forward pass has gathered are given back first.
        module.reshard()  # type: ignore[operator]
    groups = _groups(modules)
    full = {id(one): _whole_parameter(one) for one in model.parameters() if _is_dtensor(one)}
    states = None if optimizer is None else _whole_states(optimizer)
    # torch keeps the state of divided modules here as well.
    registry = _composable_state._module_state_mapping
    registered = {module: registry[module] for module in classes if module in registry}
    with AllOrNothing(modules, optimizer) as undo:

        def put_back() -> None:
            undo.undo()
            for module, divided in classes.items():
                module.__class__ = divided
            registry.update(registered)

        try:
            for module, divided in classes.items():
                registry.pop(module, None)
                module.__class__ = next(one for one in divided.__mro__ if not _is_of_torch_distributed(one))
            for module in modules:
                _drop_sharding(module)
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = full.get(id(parameter), parameter)
            if optimizer is not None and states is not None:
                _exchange(optimizer, full, states)
            before = [id(parameter) for parameter in model.parameters()]
            yield
            if before == [id(parameter) for parameter in model.parameters()]:
                put_back()
            else:
                _divide(model, groups, optimizer)
        except BaseException:
            put_back()
            raise


@dataclass
class _Group:
    """Modules whose parameters one call of `fully_shard` has divided, its arguments, and settings made afterwards."""

    modules: tuple[nn.Module, ...]
    arguments: dict[str, Any]
    settings: dict[str, Any]
    # The placement of every parameter that is not along its first axis, by module and name.
    placements: dict[tuple[nn.Module, str], Any]
    forward_prefetch: list[nn.Module]
    backward_prefetch: list[nn.Module]
    # Why `fully_shard` cannot repeat it; None if it can.
    problem: str | None = None


def _groups(modules: Iterable[nn.Module]) -> list[_Group]:
    """Return how the modules are divided, in an order in which `fully_shard` can repeat it: inner ones first."""
    states: dict[int, Any] = {}
    for module in modules:
        if _is_divided(module):
            state = module._get_fsdp_state()  # type: ignore[operator]
            states.setdefault(id(state), state)
    return [_group(state) for state in reversed(states.values())]


def _group(state: Any) -> _Group:
    of_modules = tuple(state._modules)
    forward, backward = ([one._modules[0] for one in getattr(state, f"_states_to_{way}_prefetch", ())] for way in _WAYS)
    try:
        parameters = state._fsdp_param_group
    except AssertionError:
        return _Group(of_modules, {}, {}, {}, forward, backward, "its parameters are divided over several meshes")
    arguments: dict[str, Any] = {"mp_policy": state._mp_policy}
    if parameters is None:
        # Without parameters of its own, a module needs a mesh only for its hooks.
        return _Group(of_modules, arguments, {}, {}, forward, backward)
    mesh, after = parameters.mesh_info, parameters.post_forward_mesh_info
    arguments |= {"mesh": mesh.mesh, "offload_policy": parameters.offload_policy}
    if not getattr(state, "_auto_reshard_after_forward", False):
        is_smaller = after is not None and after.shard_mesh_size != mesh.shard_mesh_size
        arguments["reshard_after_forward"] = after.shard_mesh_size if is_smaller else after is not None
    problem, placements = None, {}
    for one in parameters.fsdp_params:
        if one.sharded_param.device_mesh != mesh.mesh:
            problem = "it is also divided by tensor parallelism"
        if one.fsdp_placement.dim != 0:
            placements[one._module_info.module, one._module_info.param_name] = one.fsdp_placement
    settings = {name: getattr(parameters, name) for name in _SETTINGS if hasattr(parameters, name)}
    return _Group(of_modules, arguments, settings, placements, forward, backward, problem)


_WAYS = ("forward", "backward")


def _divide(model: nn.Module, groups: Iterable[_Group], optimizer: torch.optim.Optimizer | None) -> None:
    """Call `fully_shard` as it was called before, and give the optimizer the new parameters and parts of its state."""
    from torch.distributed.fsdp import fully_shard

    groups = list(groups)
    for group in groups:
        if group.problem is not None:
            raise ValueError(
                f"model cannot be divided again as it was: {group.problem}; grow s3d_fast.unsharded(model), and call "
                "fully_shard on the result"
            )
    before = dict(model.named_parameters(remove_duplicate=False))
    for group in groups:
        placements = {id(module._parameters[name]): placement for (module, name), placement in group.placements.items()}
        more: dict[str, Any] = {}
        if placements:
            more["shard_placement_fn"] = _by_identity(placements)
        fully_shard(group.modules[0] if len(group.modules) == 1 else list(group.modules), **group.arguments, **more)
        parameters = group.modules[0]._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
        for name, value in group.settings.items():
            setattr(parameters, name, value)
    for group in groups:
        if group.forward_prefetch:
            group.modules[0].set_modules_to_forward_prefetch(group.forward_prefetch)  # type: ignore[operator]
        if group.backward_prefetch:
            group.modules[0].set_modules_to_backward_prefetch(group.backward_prefetch)  # type: ignore[operator]
    if optimizer is None:
        return
    after = dict(model.named_parameters(remove_duplicate=False))
    parts: dict[int, Any] = {id(old): after[name] for name, old in before.items()}
    states = {
        parameter: {key: _divided_like(parts.get(id(parameter)), value) for key, value in entries.items()}
        for parameter, entries in optimizer.state.items()
    }
    _exchange(optimizer, parts, states)


def _by_identity(placements: dict[int, Any]) -> Callable[[nn.Parameter], Any]:
    return lambda parameter: placements.get(id(parameter))


def _exchange(optimizer: torch.optim.Optimizer, successors: dict[int, Any], states: dict[Any, dict[str, Any]]) -> None:
    """Put other parameters, and their states, in the place of an optimizer's."""
    for group in optimizer.param_groups:
        group["params"] = [successors.get(id(parameter), parameter) for parameter in group["params"]]
    optimizer.state.clear()
    for parameter, entries in states.items():
        optimizer.state[successors.get(id(parameter), parameter)] = entries


def _whole_states(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    return {
        parameter: {key: value.full_tensor() if _is_dtensor(value) else value for key, value in entries.items()}
        for parameter, entries in optimizer.state.items()
    }


def _divided_like(parameter: Any, value: Any) -> Any:
    """Return this process's part of an entry of optimizer state, divided as its parameter is."""
    if not _is_dtensor(parameter) or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    from torch.distributed.tensor import Replicate, distribute_tensor

    # An entry may be a mean over an axis, of length 1.
    placements = [
        Replicate() if one.is_shard() and value.shape[one.dim] != parameter.shape[one.dim] else one
        for one in parameter.placements
    ]
    # All processes have the same whole entry: nothing need be sent.
    return distribute_tensor(value, parameter.device_mesh, placements, src_data_rank=None)


def _whole_parameter(parameter: Any) -> nn.Parameter:
    return nn.Parameter(parameter.full_tensor().detach().clone(), requires_grad=parameter.requires_grad)


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "full_tensor")


def _is_divided(module: nn.Module) -> bool:
    # By its name: the import takes time, and fails where torch is built without torch.distributed.
    return any(one.__name__ == "FSDPModule" and _is_of_torch_distributed(one) for one in type(module).__mro__)


def _is_of_torch_distributed(one: Any) -> bool:
    """Return whether a class or a hook belongs to torch.distributed, such as the classes that `fully_shard` makes."""
    function = getattr(one, "hook", one)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def _drop_sharding(module: nn.Module) -> None:
    """Take the hooks and the state of `fully_shard` from a module."""
    for name, value in list(vars(module).items()):
        if name.startswith(("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")):
            del module.__dict__[name]
        elif name.endswith("_hooks") and isinstance(value, dict):
            hooks: dict[Any, Callable[..., Any]] = value
            for key in [key for key, hook in hooks.items() if _is_of_torch_distributed(hook)]:
                del hooks[key]
