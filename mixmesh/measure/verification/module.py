"""The user's own module on one device, with which a plan is compared."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import InputError, MixmeshError
from ...frontend.trace.autocast import Autocast, under
from ...frontend.trace.capture import Batch
from ...frontend.trace.failures import CALL_ONCE
from ...frontend.trace.locate import place_of_error
from ...frontend.trace.outputs import named_tensors
from ...frontend.trace.returned_loss import loss_of
from .compare import Outcome
from .draws import DrawsAlike
from .wide import WIDE_DTYPE, WITHIN, Wide, Widened, exact, widen


class Reference:
    """A copy of a module that runs step by step; state that a forward pass leaves on it stays for the next
    one.

    With ``wide`` it computes in float64, whatever dtypes it uses (see ``wide``), and its arguments and
    results are float64 too. It is called under ``autocast``. Random numbers depend on the shape (see
    ``draws``)."""

    def __init__(
        self, model: nn.Module, batch: Batch, *, wide: bool, autocast: Autocast | None = None
    ) -> None:
        self._autocast = autocast
        self._model, self._batch, self._wide = copy_of(model), batch, wide
        inputs = batch.tensors()
        self._inputs = tuple(map(widen, inputs)) if wide else inputs
        self._hooks = {name: p for name, p in model.named_parameters() if has_hooks(p)}

    def run(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Outcome:
        """Runs the forward and backward pass of a step with these parameters and buffers, which do not
        change. A buffer of another shape afterwards is left out: only one that no step reads and no
        checkpoint saves can be traced, such as positions that are made anew for another size."""
        self._put(params, buffers)
        with _compared(self._wide), torch.enable_grad():
            with under(self._autocast):
                output = self._call()
            loss = loss_of(output)
            shown = {} if loss is output else {n: x.detach() for n, x in named_tensors(output)}
            loss.backward()
            value = loss.item()
        gradients = {
            n: None if p.grad is None else exact(p.grad).detach()
            for n, p in self._model.named_parameters()
            if p.requires_grad
        }
        after = {
            n: exact(b).detach()
            for n, b in self._model.named_buffers()
            if n in buffers and b.shape == buffers[n].shape
        }
        return Outcome(value, gradients, after, {n: exact(x).detach() for n, x in shown.items()})

    def _call(self) -> Any:
        try:
            return self._batch.call(self._model, self._inputs)
        except MixmeshError:
            raise
        except Exception as error:  # it depends on values, which fake tensors in tracing lack
            reason = next(iter(str(error).splitlines()), "")
            raise InputError(
                "the model's forward pass fails on this batch, on one device",
                got=f"{type(error).__name__}: {reason}",
                where=str(place_of_error(error, WITHIN)),
                hint=CALL_ONCE,
            ) from error

    def _put(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Replaces all parameters and buffers by these values, under every name of each."""
        for held, values in (("_parameters", params), ("_buffers", buffers)):
            copy_of: dict[int, Tensor] = {}
            for prefix, module in list(self._model.named_modules(remove_duplicate=False)):
                for leaf, old in list(getattr(module, held).items()):
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    if old is None or any(old is new for new in copy_of.values()):
                        continue
                    if id(old) not in copy_of:
                        copy_of[id(old)] = self._copy(name, old, values)
                    getattr(module, held)[leaf] = copy_of[id(old)]
            for module in self._model.modules():
                if isinstance(module, nn.RNNBase):  # it also keeps its weights in a list
                    names = module._flat_weights_names
                    module._flat_weights = [getattr(module, n, None) for n in names]

    def _copy(self, name: str, old: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        value = values[name].detach().clone()
        if self._wide and old.dtype in WIDE_DTYPE:
            value = Wide(value, old.dtype)
        if not isinstance(old, nn.Parameter):
            return value
        parameter = nn.Parameter(value, old.requires_grad)
        for hook in (getattr(self._hooks.get(name), "_backward_hooks", None) or {}).values():
            parameter.register_hook(hook)
        return parameter


def has_hooks(p: Tensor) -> bool:
    """Whether there are hooks on the gradient of a parameter."""
    return bool(getattr(p, "_backward_hooks", None) or getattr(p, "_post_accumulate_grad_hooks", None))


def copy_of(model: nn.Module) -> nn.Module:
    """Copies a module, even one with attributes computed from parameters, which PyTorch does not copy:
    torch.nn.utils.weight_norm keeps such a weight, and recomputes it in every forward pass."""
    kept = [x for m in model.modules() for x in vars(m).values() if isinstance(x, Tensor) and not x.is_leaf]
    return copy.deepcopy(model, {id(x): x.detach().clone() for x in kept})


@contextmanager
def _compared(wide: bool) -> Iterator[None]:
    """A context in which attention and other operators run on kernels that exist for every dtype."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(before and not wide)
    try:
        with sdpa_kernel(SDPBackend.MATH), Widened() if wide else DrawsAlike():
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)
