"""Capture without tracing: hooks on layers that you name, for growers that have their own surgery."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from s3d_fast.backends.operations import unchecked_curvature
from s3d_fast.base import require
from s3d_fast.base.losses import checked_loss
from s3d_fast.capture.all_batches import Captured, capture_with
from s3d_fast.capture.folding import module_scale
from s3d_fast.capture.forms import conv_operator
from s3d_fast.maths.activations import Activation, activation
from s3d_fast.network.wrapping import unwrap
from s3d_fast.operators import PointwiseOperator, SplittingOperator
from s3d_fast.operators.operator import LayerShape


def capture_layers(
    model: nn.Module,
    layers: Mapping[str, str | Activation | nn.Module | Callable[..., Any]],
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    *,
    batchnorm: str = "eval",
    dtype: torch.dtype | None = None,
    sharpness: float | None = None,
    memory_budget: int | str | None = None,
    scratch: str | os.PathLike[str] | bool = True,
    progress: bool = False,
) -> Captured:
    """Return the splitting operators of layers that you name, averaged over the batches; the model is not traced.

    This is the eigen backend for growers that have their own surgery. S has the curvature of the activation named, and
    no other: it is `capture(..., curvature="paper")`. Each layer's output, perhaps after a BatchNorm,
    goes through the activation named. How the code writes the activation does not matter: its output is recognised by
    its values. `extremal_eigenpairs(...)[name].as_weights("v_min")` gives the result in the shapes of the layer.

    Args:
        model: any module; it stays as it is.
        layers: for the name of every layer (Linear, or Conv2d without groups) the activation that follows it, as for
            `activation`: a name such as "silu", a module, a function or an Activation.
        loss_fn, batches: as for `capture`.
        batchnorm: "eval", with running statistics; or "train", where BatchNorms use the statistics of the batch, which
            the splitting matrix holds fixed. Everything else is in eval mode.
        dtype, sharpness, memory_budget, scratch, progress: as for `capture`.

    Raises:
        ValueError, TypeError: a layer is not there or is of another kind, no activation was found behind it, or as for
            `capture`.
    """
    model = unwrap(model)
    require.choice("batchnorm", batchnorm, ("eval", "train"))
    if not layers:
        raise ValueError("layers must name at least one layer, got none")
    chosen = [_Named.of(model, name, activation(which, sharpness=sharpness)) for name, which in layers.items()]
    capturer = _LayerCapture(model, loss_fn, batchnorm == "train")
    captured = capture_with(capturer, chosen, batches, dtype, memory_budget, scratch, progress)
    captured.layers = {
        layer.name: LayerShape(tuple(layer.module.weight.shape), 0, layer.module.bias is not None) for layer in chosen
    }
    return captured


@dataclass(frozen=True)
class _Named:
    """A layer and its activation."""

    name: str
    module: nn.Conv2d | nn.Linear
    activation: Activation

    @classmethod
    def of(cls, model: nn.Module, name: str, act: Activation) -> _Named:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            known = [n for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
            raise ValueError(f"layers: the model has no layer {name!r}; it has {', '.join(known[:20])}") from None
        if not isinstance(module, (nn.Conv2d, nn.Linear)):
            raise TypeError(f"layers: {name!r} must be a Linear or a Conv2d, got {type(module).__name__}")
        if isinstance(module, nn.Conv2d) and (module.groups != 1 or module.padding_mode != "zeros"):
            raise ValueError(f"layers: {name!r} must have groups = 1 and padding with zeros")
        return cls(name, module, act)


@dataclass
class _Seen:
    """What a forward pass has shown of one layer so far."""

    layer: _Named
    x: Tensor
    z: Tensor  # the activation's input, as far as is known: the output of the layer, or of its BatchNorm
    values: Tensor  # a copy of z: the activation may write over it
    scale: Tensor | None = None
    after: Tensor | None = None


class _LayerCapture:
    """Captures one batch at a time by hooks; see `BatchCapture`."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], train_norms: bool) -> None:
        self.model, self.loss_fn, self.train_norms = model, loss_fn, train_norms

    def check(self) -> None:
        """Every pass looks at the layers anew."""

    def __call__(
        self,
        batch: Any,
        index: int,
        units: Sequence[_Named],
        keep: Callable[[str, SplittingOperator], object],
        dtype: torch.dtype | None = None,
    ) -> float:
        seen: dict[str, _Seen] = {}
        with ExitStack() as stack, torch.enable_grad():
            stack.enter_context(_Watch(seen))
            for layer in units:
                hook = layer.module.register_forward_hook(_layer_hook(layer, seen))
                stack.callback(hook.remove)
            for module in self.model.modules():
                if isinstance(module, _BatchNorm):
                    if self.train_norms:
                        module.train()
                    stack.callback(module.register_forward_hook(_norm_hook(seen)).remove)
            loss = checked_loss(self.model, self.loss_fn, batch, index)
        for layer in units:
            if layer.name not in seen:
                raise ValueError(f"layers: {layer.name!r} was not evaluated for batch {index}")
            if seen[layer.name].after is None:
                raise ValueError(
                    f"layers: nothing behind {layer.name!r} computes {layer.activation.name} of its output; "
                    "is it another activation, or does something other than a BatchNorm stand between them?"
                )
        ends = [seen[layer.name].after for layer in units]
        gradients = torch.autograd.grad(loss, ends, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
        for layer, g in zip(units, gradients, strict=True):
            keep(layer.name, _operator(seen.pop(layer.name), g, dtype))
        return float(loss.detach())


def _layer_hook(layer: _Named, seen: dict[str, _Seen]) -> Callable[..., Tensor]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        if layer.name in seen:
            raise ValueError(f"layers: {layer.name!r} must be evaluated once per batch")
        # Layers behind it need a gradient even if nothing before it requires one.
        output = output if output.requires_grad else output.detach().requires_grad_()
        # The output may be written over by an activation; a leaf may not.
        output = output * 1 if output.is_leaf else output
        seen[layer.name] = _Seen(layer, inputs[0].detach(), output, output.detach().clone())
        return output

    return hook


def _norm_hook(seen: dict[str, _Seen]) -> Callable[..., None]:
    def hook(module: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        for one in seen.values():
            # Where an activation changes nothing, as a ReLU of positive numbers, what came before may look like it.
            is_input = one.z is inputs[0] or (one.after is inputs[0] and torch.equal(one.after, one.values))
            if is_input and one.scale is None:
                one.scale, one.after = _scale(module, one.values), None
                one.z, one.values = output, output.detach().clone()

    return hook


def _scale(norm: Any, a: Tensor) -> Tensor:
    """Return the factor by which a BatchNorm multiplies every channel, held fixed."""
    if not norm.training and norm.running_var is not None:
        return module_scale(norm)
    axes = [axis for axis in range(a.dim()) if axis != 1]
    scale = torch.rsqrt(a.var(axes, unbiased=False) + norm.eps)
    return scale if norm.weight is None else scale * norm.weight.detach()


class _Watch(TorchFunctionMode):
    """Looks at every result of the forward pass for the one that is the activation of a layer's output."""

    def __init__(self, seen: dict[str, _Seen]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.requires_grad:
            waiting = [one for one in self.seen.values() if one.after is None and one.values.shape == result.shape]
            for one in waiting:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    wanted = one.layer.activation(one.values)
                    rounding = 100 * torch.finfo(result.dtype).eps
                    is_it = torch.allclose(result, wanted.to(result.dtype), rtol=rounding, atol=rounding)
                if is_it:
                    one.after = result
        return result


def _operator(seen: _Seen, g: Tensor, dtype: torch.dtype | None) -> SplittingOperator:
    module, x, z = seen.layer.module, seen.x, seen.values
    kept = x.dtype if dtype is None else dtype
    is_conv = isinstance(module, nn.Conv2d)
    axis = z.dim() - 3 if is_conv else (1 if seen.scale is not None and z.dim() > 2 else z.dim() - 1)
    scale = None if seen.scale is None else seen.scale.to(z.dtype)
    C = unchecked_curvature(g.contiguous(), z.contiguous(), seen.layer.activation, scale, axis)
    bias = module.bias is not None
    try:
        if isinstance(module, nn.Conv2d):
            geometry = (tuple(module.kernel_size), module.stride, module.padding, module.dilation)
            return conv_operator(x.to(kept), C.to(kept), bias, *geometry)
        return PointwiseOperator(x.flatten(0, -2).to(kept), C.flatten(0, -2).to(kept), bias=bias)
    except ValueError as error:
        raise ValueError(f"layer {seen.layer.name!r}: {error}") from error
