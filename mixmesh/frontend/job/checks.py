"""Checks of the value that the user's function returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...errors import JobError
from .job import Job

DEFAULT_FUNCTION = "job"
EXAMPLE = "return mixmesh.Job(model, batch)"


def check_job(job: Any, function_name: str = DEFAULT_FUNCTION, where: str = "") -> None:
    """Raises JobError if ``job`` is not a job that can be planned."""
    from torch import nn

    def fail(message: str, expected: str, got: str, *hint: str) -> JobError:
        return JobError(f"{function_name}() {message}", expected=expected, got=got, where=where, hint=hint)

    if not isinstance(job, Job):
        hint = EXAMPLE
        if isinstance(job, tuple | list) and job and isinstance(job[0], nn.Module):
            hint = "return mixmesh.Job(*those values)" if len(job) > 1 else EXAMPLE
        elif job is None:
            hint = f"end {function_name} with:  {EXAMPLE}"
        raise fail("does not return a job", "a mixmesh.Job(model, batch, ...)", _describe(job), hint)
    model = job.model
    if not isinstance(model, nn.Module):
        hint = "an instance, not the class: Model(...)" if isinstance(model, type) else ""
        raise fail("returns a job whose model is no module", "a torch.nn.Module", _describe(model), hint)
    if not any(True for _ in model.parameters()):
        raise fail("returns a model without parameters", "something to train", _describe(model))
    _check_functions(job, fail)
    if job.data is not None and not isinstance(job.data, Iterable):
        raise fail("returns data that cannot be iterated over", "an iterable of batches", _describe(job.data))
    _check_batch(job.batch, fail)


def _check_functions(job: Job, fail: Callable[..., JobError]) -> None:
    import torch

    if job.optimizer is not None and (
        not callable(job.optimizer) or isinstance(job.optimizer, torch.optim.Optimizer)
    ):
        raise fail(
            "returns a job whose optimizer cannot be called",
            "a function from parameters to an optimizer",
            _describe(job.optimizer),
            "optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
        )
    if job.scheduler is not None and not callable(job.scheduler):
        raise fail(
            "returns a job whose scheduler cannot be called",
            "a function from the optimizer to a learning rate scheduler",
            _describe(job.scheduler),
            "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)",
        )
    if job.scaler is not None and not isinstance(job.scaler, torch.amp.GradScaler):
        raise fail(
            "returns a job with a scaler of another kind",
            "a torch.amp.GradScaler",
            _describe(job.scaler),
            "scaler=torch.amp.GradScaler()",
        )


def _check_batch(batch: Any, fail: Callable[..., JobError]) -> None:
    import torch
    from torch.utils import _pytree as pytree

    if not isinstance(batch, Mapping | tuple | list):
        hint = 'batch={"x": x}' if isinstance(batch, torch.Tensor) else ""
        raise fail(
            "returns a batch of the wrong kind",
            "a dict for model(**batch), or a tuple for model(*batch)",
            _describe(batch),
            hint,
        )
    tree = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
    if isinstance(batch, Mapping):
        odd = [k for k in batch if not isinstance(k, str)]
        if odd:
            raise fail("returns a batch with a key that is no name", "argument names", repr(odd[0]))
    pairs, _ = pytree.tree_flatten_with_path(tree)
    tensors = [(pytree.keystr(path), x) for path, x in pairs if isinstance(x, torch.Tensor)]
    if not tensors:
        raise fail(
            "returns a batch without tensors", "at least one tensor", _describe(batch) if batch else "nothing"
        )
    sized = [(name, x) for name, x in tensors if x.ndim]
    sizes = {name: x.shape[0] for name, x in sized}
    shown = ", ".join(f"{name} {list(x.shape)}" for name, x in sized[:6])
    if len(set(sizes.values())) > 1:
        raise fail(
            "returns a batch whose tensors differ in dim 0",
            "the same number of samples in dim 0 of every tensor",
            shown,
            "keep what is not per sample on the module (register_buffer), or as a plain number",
        )
    if 0 in sizes.values():
        raise fail("returns an empty batch", "at least one sample", shown)


def _describe(x: Any) -> str:
    import torch

    if x is None:
        return "None"
    if isinstance(x, torch.Tensor):
        return f"a tensor of shape {list(x.shape)}"
    if isinstance(x, torch.nn.Module):
        return f"a model alone ({type(x).__name__})"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {', '.join(type(v).__name__ for v in x[:5]) or 'nothing'}"
    if isinstance(x, Mapping):
        return f"a {type(x).__name__} with {', '.join(map(str, list(x)[:5])) or 'nothing'}"
    return f"{_article(type(x).__name__)} {type(x).__name__}"


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"
