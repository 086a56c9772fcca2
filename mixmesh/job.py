"""A job: the user's own file, a function in it, and what that function returns.

A job is named ``path/to/file.py:function`` (``job`` if no function is named). The function takes nothing
and returns a ``Job``. ``workload:NAME:SAMPLES`` is one of the package's own (``mixmesh.workloads``).
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import InputError, JobError, MixmeshError
from .optimizer_states import ADAM, OptimizerStates

DEFAULT_FUNCTION = "job"
WORKLOAD = "workload:"
EXAMPLE = "return mixmesh.Job(model, batch)"


@dataclass(frozen=True)
class Job:
    """A model to train, with its batch and optimizer.

    ``model(**batch)`` (or ``model(*batch)`` for a tuple) returns a scalar loss or an object with
    ``.loss``. ``batch`` is one global example batch, the samples in dim 0 of its tensors; tensors without
    dims stand for themselves. ``optimizer`` maps parameters to a ``torch.optim`` optimizer, ``data`` is
    iterated over for batches like ``batch``. ``outputs`` names what the parallel model returns beside the
    loss, of what the model does (``("logits",)``, or ``(1,)`` of a tuple).
    """

    model: Any
    batch: Mapping[str, Any] | tuple
    optimizer: Callable[[Iterable], Any] | None = None
    data: Iterable | None = None
    outputs: tuple[str | int, ...] = ()


def load_job(text: str, *, weights: bool = True) -> Job:
    """The job that ``path/to/file.py:function`` or ``workload:NAME:SAMPLES`` names. Raises JobError, and
    nothing else. Without ``weights`` a workload is made of shapes alone, which is enough to plan it."""
    if text.startswith(WORKLOAD):
        from .workloads import make

        return make(text.removeprefix(WORKLOAD), "cpu" if weights else "meta")
    path, function_name = split_name(text)
    with _importing_beside(path):
        module = _import(path)
        function = _function(module, path, function_name)
        where = _place(function, path)
        try:
            made = function()
        except MixmeshError:
            raise
        except (Exception, SystemExit) as error:
            raise JobError(
                f"{function_name}() failed: {_reason(error)}", where=_place_in(error, path) or where
            ) from None
    check_job(made, function_name, where)
    return made


def split_name(text: str) -> tuple[Path, str]:
    """``gpt.py:small`` -> its path and function. Raises JobError if there is no such file."""
    file, _, function = text.rpartition(":")
    if not file or (not function.isidentifier() and Path(text).exists()):
        file, function = (text, "") if not file else (text, "")
    path, function = Path(file), function or DEFAULT_FUNCTION
    if not function.isidentifier():
        raise JobError(
            f"{function!r} is no name of a function",
            expected="path/to/file.py:function",
            got=text,
            hint=f"{file}:{DEFAULT_FUNCTION}",
        )
    if path.is_dir():
        raise JobError(
            f"{path} is a folder", expected="path/to/file.py:function", got=text, hint=_files_in(path)
        )
    if not path.is_file():
        raise JobError(
            f"there is no file {path}",
            expected="path/to/file.py:function",
            got=text,
            hint=_similar_files(path),
        )
    return path, function


def _files_in(folder: Path) -> tuple[str, ...]:
    return tuple(str(p) for p in sorted(folder.glob("*.py"))[:3])


def _similar_files(path: Path) -> tuple[str, ...]:
    folder = path.parent
    if not folder.is_dir():
        return ()
    names = [p.name for p in folder.iterdir() if p.suffix == ".py"]
    return tuple(str(folder / name) for name in difflib.get_close_matches(path.name, names, 2))


def _import(path: Path) -> ModuleType:
    # the name holds the path, so that two files called job.py are two modules
    name = f"mixmesh_job_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    # with the loader named, a file that does not end in .py is read as well
    loader = importlib.machinery.SourceFileLoader(name, str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path.resolve(), loader=loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise JobError(
            f"{path} is not Python: {error.msg}", where=f"{_short(error.filename)}:{error.lineno}", got=line
        ) from None
    except MixmeshError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and "null bytes" in str(error) or isinstance(error, UnicodeError):
            raise JobError(f"{path} is not Python: it is not text", where=str(path)) from None
        raise JobError(
            f"{path} cannot be imported: {_reason(error)}", where=_place_in(error, path) or str(path)
        ) from None
    return module


@contextmanager
def _importing_beside(path: Path) -> Iterator[None]:
    """The job may import the files next to it."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _function(module: ModuleType, path: Path, name: str) -> Callable[[], Any]:
    functions = [
        n
        for n, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and not n.startswith("_")
    ]
    function = vars(module).get(name)
    if function is None:
        near = difflib.get_close_matches(name, functions, 2) or functions[:2]
        raise JobError(
            f"{path} has no function {name}",
            expected=f"def {name}(): ... {EXAMPLE}",
            got=", ".join(functions) or "no function at all",
            where=str(path),
            hint=tuple(f"{path}:{n}" for n in near),
        )
    if not callable(function):
        raise JobError(f"{name} in {path} is not a function", got=type(function).__name__, where=str(path))
    if isinstance(function, type) or _needs_arguments(function):
        raise JobError(
            f"{name} cannot be called without arguments",
            expected=f"def {name}(): ... {EXAMPLE}",
            got=f"{name}{_signature(function)}",
            where=_place(function, path),
        )
    return function


def _needs_arguments(function: Callable) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # no signature is known
        return False
    return False


def _signature(function: Callable) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "(...)"


# --- what the function returned --------------------------------------------------------------------------


def check_job(made: Any, function_name: str = DEFAULT_FUNCTION, where: str = "") -> None:
    """Raises JobError if ``made`` is not a job that can be planned."""
    import torch
    from torch import nn

    def fail(message: str, expected: str, got: str, *hint: str):
        return JobError(f"{function_name}() {message}", expected=expected, got=got, where=where, hint=hint)

    if not isinstance(made, Job):
        hint = EXAMPLE
        if isinstance(made, tuple | list) and made and isinstance(made[0], nn.Module):
            hint = "return mixmesh.Job(*those values)" if len(made) > 1 else EXAMPLE
        elif made is None:
            hint = f"end {function_name} with:  {EXAMPLE}"
        raise fail("does not return a job", "a mixmesh.Job(model, batch, ...)", _describe(made), hint)
    if not isinstance(made.model, nn.Module):
        given = made.model
        hint = "an instance, not the class: Model(...)" if isinstance(given, type) else ""
        raise fail("returns a job whose model is no module", "a torch.nn.Module", _describe(given), hint)
    if not any(True for _ in made.model.parameters()):
        raise fail("returns a model without parameters", "something to train", _describe(made.model))
    if made.optimizer is not None and (
        not callable(made.optimizer) or isinstance(made.optimizer, torch.optim.Optimizer)
    ):
        raise fail(
            "returns a job whose optimizer cannot be called",
            "a function from parameters to an optimizer",
            _describe(made.optimizer),
            "optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
        )
    if made.data is not None and not isinstance(made.data, Iterable):
        raise fail(
            "returns data that cannot be iterated over", "an iterable of batches", _describe(made.data)
        )
    _check_batch(made.batch, fail)


def _check_batch(batch: Any, fail) -> None:
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


def batch_size(batch: Mapping[str, Any] | tuple) -> int | None:
    """Samples in a batch; None if no tensor of it has dims."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else tuple(batch))
    return next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim), None)


def optimizer_states(optimizer: Callable[[Iterable], Any] | None) -> OptimizerStates:
    """Tensors of state per parameter: 2 for Adam, 0 for plain SGD; and of those that its steps make. As an
    Adam that is not fused if that cannot be found out."""
    import torch

    if optimizer is None:
        return ADAM
    try:
        p = torch.nn.Parameter(torch.zeros(4, 4))
        made = optimizer([p])
        is_fused = can_be_fused(made) or all(group.get("fused") for group in made.param_groups)
        p.grad = torch.ones_like(p)
        made.step()
        kept = sum(isinstance(s, torch.Tensor) and s.shape == p.shape for s in made.state[p].values())
    except Exception:  # the user's own function, on parameters that are not the model's
        kept, is_fused = 2, False
    return OptimizerStates(kept, 0 if is_fused else _made_beside(kept))


def _made_beside(kept: int) -> int:
    """Adam makes the root of its second moment and the quotient (torch.optim); the others one tensor at
    most, for the weight decay."""
    return 2 if kept > 1 else 1


# kinds with a kernel that reads and writes everything once; Adagrad has its states from the start
FUSED = ("SGD", "Adam", "AdamW")


def can_be_fused(optimizer: Any) -> bool:
    """Whether an optimizer that is new and says nothing of how its steps are made can have PyTorch's fused
    kernel make them (``runtime.optimizers.fuse``)."""
    import torch

    groups = optimizer.param_groups
    if type(optimizer) not in [getattr(torch.optim, name) for name in FUSED] or optimizer.state:
        return False
    for group in groups:
        # None is nobody's choice, False is one
        free = all(group.get(name, False) is None for name in ("fused", "foreach"))
        if not free or group.get("differentiable") or group.get("capturable"):
            return False
    params = [p for group in groups for p in group["params"]]
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params)


# optimizers of which each element of the update depends on the same element of gradient and state only
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer may step a part of a parameter by itself."""
    import torch

    return isinstance(optimizer, tuple(getattr(torch.optim, name) for name in ELEMENTWISE))


def check_supported(optimizer: Any) -> None:
    """Raises InputError for an optimizer that steps under no plan."""
    import torch

    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS is not supported: its line search needs whole gradients and repeated steps",
            expected="an optimizer that works element by element: " + ", ".join(ELEMENTWISE),
            got="LBFGS, which no plan can step",
            hint=(
                "torch.optim.AdamW(model.parameters(), lr=1e-3), without a closure",
                "or train with LBFGS on one device, without torchrun",
            ),
        )


def needs_whole_parameters(optimizer: Callable[[Iterable], Any] | None) -> bool:
    """Whether a job's optimizer looks at whole parameters (LAMB, Adafactor). False if that cannot be found
    out. Raises InputError for one that steps under no plan."""
    import torch

    if optimizer is None:
        return False
    try:
        made = optimizer([torch.nn.Parameter(torch.zeros(4, 4))])
    except Exception:  # the user's own function, on parameters that are not the model's
        return False
    check_supported(made)
    return not is_elementwise(made)


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


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    kind = type(error).__name__
    return f"{kind}: {text[0]}" if text else kind


def _place(function: Callable, path: Path) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if code else str(path)


def _place_in(error: BaseException, path: Path) -> str:
    """The last line of the user's own folder on the way to the error, with its text."""
    folder = str(path.resolve().parent) + os.sep
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(folder) and "site-packages" not in frame.filename:
            return f"{_short(frame.filename)}:{frame.lineno}" + (f", {frame.line}" if frame.line else "")
    return ""


def _short(filename: str | None) -> str:
    here = os.getcwd() + os.sep
    return (filename or "").removeprefix(here)
