"""Mutated checkpoints: whole state dicts, and folders of ``torch.distributed.checkpoint``.

What a plain model or optimizer of one device makes of the same file is the yardstick. A parallel one must
come to its piece of the same values, or refuse. What it refuses itself it refuses with a MixmeshError, and
leaves its values as they were. What PyTorch cannot read is PyTorch's to refuse.
"""

from __future__ import annotations

import copy
import io
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mixmesh.errors import MixmeshError
from mixmesh.lang.plan_file import Plan
from mixmesh.runtime import shard_files
from mixmesh.runtime.parallel import load_full_optimizer_state_dict, parallelize
from mixmesh.runtime.shard_tensor import plain

from . import seeds

RANK = 1
CPU = torch.device("cpu")
VALUES = (None, 3, -1, 0.5, "x", [], {}, [1, 2], b"x", float("nan"), True)
MODEL = "words"


@dataclass(frozen=True)
class Made:
    """The model of rank ``RANK`` with its optimizer, a single device's, and what that one has saved."""

    model: Any
    optimizer: torch.optim.Optimizer
    single: torch.nn.Module
    single_optimizer: torch.optim.Optimizer
    state: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    folder: dict[str, bytes]


class Pieces(torch.Tensor):
    """A whole tensor as ``torch.distributed.checkpoint`` gets it from ranks that hold pieces of it."""

    pieces: dict[tuple[int, ...], Tensor]

    def __create_write_items__(self, name: str, _tensor: Any) -> list:
        pieces = self.pieces.items()
        return [item for piece in pieces for item in shard_files.write_items(name, self.shape, piece)]

    def __create_chunk_list__(self) -> list:
        return [chunk for piece in self.pieces.items() for chunk in shard_files.chunks(piece)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.pieces[tuple(index.offset)]


@cache
def made() -> Made:
    """Made once in a process: a pretended world of the plan's ranks, none of which is there but this one."""
    known = seeds.models()[MODEL]
    text = next(text for name, text in seeds.plans() if name == MODEL and '"fsdp-even"' in text)
    plan = Plan.parse(text)
    single, other = copy.deepcopy(known.module), copy.deepcopy(known.module)
    single_optimizer = torch.optim.AdamW(single.parameters(), lr=0.01)
    single(**known.batch).backward()
    single_optimizer.step()
    single_optimizer.zero_grad()
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=RANK, world_size=plan.program.world_size)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    model, optimizer = parallelize(other, optimizer, plan, device="cpu", check_model=False)
    state = {k: v.clone() for k, v in single.state_dict().items()}
    optimizer_state = copy.deepcopy(single_optimizer.state_dict())
    model.load_full_state_dict(state)
    load_full_optimizer_state_dict(model, optimizer, optimizer_state)
    folder = _folder_of(model, state, plan.program.world_size)
    return Made(model, optimizer, single, single_optimizer, state, optimizer_state, folder)


def _folder_of(model: Any, state: dict[str, Tensor], world_size: int) -> dict[str, bytes]:
    """The files that all ranks write together."""
    parts: dict[str, Any] = {}
    for name, whole in state.items():
        stored = model._runtime.stored[name]
        if not stored.num_pieces:
            parts[name] = whole
            continue
        pieces = [(stored.origin(r), stored.piece(whole, r, CPU)) for r in range(world_size)]
        parts[name] = whole.as_subclass(Pieces)
        parts[name].pieces = {origin: piece for origin, piece in pieces if piece.numel()}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(parts, checkpoint_id=folder, no_dist=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


# --- mutations -----------------------------------------------------------------------------------------


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut short, with other bytes, or with some too many."""
    at = rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 2:
            return data[:at] + rng.randbytes(rng.choice([1, 8, 200])) + data[at:]
        case _:
            count = rng.choice([1, 16, 300])
            return data[:at] + bytes(min(count, len(data) - at)) + data[at + count :]


def other_tensor(t: Tensor, rng: random.Random) -> Any:
    """Another shape, dtype or kind of tensor; or no tensor."""
    ways: list[Callable[[], Any]] = [
        lambda: t.unsqueeze(0), lambda: t[None, ..., None], lambda: t.flatten(), lambda: t.reshape(-1)[:1],
        lambda: t.sum(), lambda: t.T if t.ndim == 2 else t[:0], lambda: t.narrow(0, 0, max(len(t) - 1, 0)),
        lambda: torch.cat([t, t[:1]]), lambda: torch.empty(0), lambda: t.double(), lambda: t.half(),
        lambda: t.long(), lambda: t.bool(), lambda: t.to(torch.complex64), lambda: t.to("meta"),
        lambda: t.to_sparse(), lambda: torch.nn.Parameter(t), lambda: t.clone().fill_(float("nan")),
        lambda: t.numpy().copy(), lambda: t.tolist(), lambda: rng.choice(VALUES),
        lambda: t.expand(2, *t.shape), lambda: t.to(torch.float8_e4m3fn),
    ]  # fmt: skip
    try:
        other = rng.choice(ways)()
        return other.detach() if isinstance(other, Tensor) and not other.is_leaf else other
    except (RuntimeError, IndexError, TypeError, ValueError):  # not of this tensor
        return rng.choice(VALUES)


def change_tree(tree: Any, rng: random.Random) -> Any:
    """A mutation somewhere in a tree of dicts and lists."""
    if isinstance(tree, dict) and tree:
        tree = dict(tree)
        key = rng.choice(list(tree))
        match rng.randrange(9):
            case 0:
                del tree[key]
            case 1:
                tree[rng.choice(["x", 99, -1, None, f"module.{key}", 0, "step"])] = tree.pop(key)
            case 2:
                tree[rng.choice(["x", 99, "0", "params"])] = tree[key]
            case 3:
                other = rng.choice(list(tree))
                tree[key], tree[other] = tree[other], tree[key]
            case 4:
                tree[key] = rng.choice(VALUES)
            case _:
                tree[key] = change_tree(tree[key], rng)
        return tree
    if isinstance(tree, list) and tree:
        at = rng.randrange(len(tree))
        new = [change_tree(tree[at], rng)] if rng.random() < 0.7 else rng.choice([[], [tree[at]] * 2])
        return [*tree[:at], *new, *tree[at + 1 :]]
    return other_tensor(tree, rng) if isinstance(tree, Tensor) else rng.choice(VALUES)


# --- what is done with them ----------------------------------------------------------------------------


class Wrong(AssertionError):
    """Values that a single device would not have, or a refusal that has changed some."""


def pieces_of(model: Any) -> dict[str, Tensor]:
    return {name: plain(t).clone() for name, t in model.state_dict(keep_vars=True).items()}


def expect_pieces(m: Made, wholes: dict[str, Tensor], what: str) -> None:
    for name, mine in pieces_of(m.model).items():
        expected = m.model._runtime.stored[name].piece(wholes[name], RANK, CPU)
        if not _same(mine, expected):
            raise Wrong(f"{name} is not what a single device has after {what}")


def load_both(
    m: Made,
    single: Callable[[], None],
    parallel: Callable[[], None],
    what: str,
    *,
    other_pieces: bool = False,
) -> bool:
    """Loads on a single device and in parallel, and raises the latter's error; whether both have loaded it.
    ``other_pieces``: what a single device reads may be read by other ranks, who then refuse for all."""
    refused = None
    try:
        single()
    except Exception as error:
        refused = error
    try:
        parallel()
    except MixmeshError:
        expect_pieces(m, m.state, f"a refused {what}")
        raise
    if refused is not None and not other_pieces:
        raise Wrong(f"{what}: a single device refuses it, and it was loaded: {str(refused)[:150]!r}")
    return refused is None


def use_state(state: Any) -> None:
    m = made()
    load_both(
        m, lambda: m.single.load_state_dict(state), lambda: m.model.load_full_state_dict(state), "full state"
    )
    expect_pieces(m, m.single.state_dict(), "load_full_state_dict")


def use_module_state(state: Any) -> None:
    """By PyTorch's own ``load_state_dict``, which refuses with errors of its own."""
    m = made()
    try:
        load_both(m, lambda: m.single.load_state_dict(state), lambda: m.model.load_state_dict(state), "state")
    except MixmeshError:
        raise
    except Exception as error:
        if isinstance(error, Wrong) or _is_own(error):
            raise
        return
    expect_pieces(m, m.single.state_dict(), "load_state_dict")


def use_optimizer_state(state: Any) -> None:
    m = made()
    before = _own_state(m)
    try:
        load_both(
            m,
            lambda: m.single_optimizer.load_state_dict(copy.deepcopy(state)),
            lambda: load_full_optimizer_state_dict(m.model, m.optimizer, copy.deepcopy(state)),
            "optimizer state",
        )
    except MixmeshError:
        if not _alike(before, _own_state(m)):
            raise Wrong("a refused optimizer state has changed the optimizer's") from None
        raise
    stored = [s for n, s in m.model._runtime.stored.items() if n in dict(m.model.named_parameters())]
    theirs = [m.single_optimizer.state.get(p, {}) for p in m.single.parameters()]
    for s, mine, whole in zip(stored, _own_state(m)[0], theirs):
        for key in {*mine, *whole}:
            expected = whole.get(key)
            if isinstance(expected, Tensor) and expected.shape == s.shape and expected.ndim:
                expected = s.piece(expected, RANK, CPU)
            if not _alike(expected, mine.get(key)):
                raise Wrong(f"{key} of {s.name} is not what a single device has")
    if not _alike(_groups(m.single_optimizer), _groups(m.optimizer)):
        raise Wrong("param_groups are not what a single device has")


def _same(a: Tensor, b: Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype and a.layout == b.layout and a.device == b.device
    return same and (a.is_meta or bool(torch.isclose(a.double(), b.double(), 0, 0, equal_nan=True).all()))


def _own_state(m: Made) -> tuple[list[dict], list[dict]]:
    params = [p for group in m.optimizer.param_groups for p in group["params"]]
    entries = [m.optimizer.state.get(p, {}) for p in params]
    own = [{k: plain(v).clone() if isinstance(v, Tensor) else v for k, v in e.items()} for e in entries]
    return own, _groups(m.optimizer)


def _groups(optimizer: torch.optim.Optimizer) -> list[dict]:
    return [{k: v for k, v in g.items() if k not in ("params", "fused")} for g in optimizer.param_groups]


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same(a, b)
    if isinstance(a, dict | list | tuple) and type(a) is type(b):
        pairs = zip(a.values(), b.values()) if isinstance(a, dict) else zip(a, b)
        return len(a) == len(b) and all(_alike(x, y) for x, y in pairs)
    return a is b or repr(a) == repr(b)


def use_folder(files: dict[str, bytes]) -> None:
    """By PyTorch's own reader, into the single device's tensors and into this rank's pieces."""
    m = made()
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)

        def read(state: dict[str, Tensor]) -> None:
            try:
                dcp.load(state, checkpoint_id=folder, no_dist=True)
            except CheckpointException as error:  # which is no Exception
                raise RuntimeError(str(error)) from error

        single, parallel = (lambda: read(m.single.state_dict())), (lambda: read(m.model.state_dict()))
        try:
            loaded = load_both(m, single, parallel, "folder", other_pieces=True)
        except Exception as error:
            if isinstance(error, MixmeshError | Wrong) or _is_own(error):
                raise
            return  # PyTorch's to refuse
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if loaded:
        expect_pieces(m, m.single.state_dict(), "torch.distributed.checkpoint.load")


def _is_own(error: Exception) -> bool:
    """Whether mixmesh raised it."""
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    return "/mixmesh/" in last.tb_frame.f_code.co_filename


def restored(use: Callable[[], None]) -> Callable[[], None]:
    """Each case begins with the values that were saved."""

    def run() -> None:
        m = made()
        m.single.load_state_dict(m.state)
        m.single_optimizer.load_state_dict(copy.deepcopy(m.optimizer_state))
        m.model.load_full_state_dict(m.state)
        load_full_optimizer_state_dict(m.model, m.optimizer, copy.deepcopy(m.optimizer_state))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex numbers that lose a part
            use()

    return run


def read_state(data: bytes, use: Callable[[Any], None]) -> None:
    """As a script would: what ``torch.load`` refuses is not ours to load."""
    try:
        state = torch.load(io.BytesIO(data), weights_only=True)
    except Exception:
        return
    use(state)


def make_case(rng: random.Random) -> tuple[str, Callable[[], None]]:
    """A mutated checkpoint in words, and what is done with it."""
    m = made()
    kind = rng.choice(("state", "optimizer", "file", "folder"))
    if kind == "folder":
        files = dict(m.folder)
        name = rng.choice(sorted(files))
        if rng.random() < 0.15:
            del files[name]
        else:
            files[name] = change_bytes(files[name], rng)
        return f"folder, {name}", restored(lambda: use_folder(files))
    tree, use = (
        (m.optimizer_state, use_optimizer_state)
        if kind == "optimizer" or (kind == "file" and rng.random() < 0.5)
        else (m.state, rng.choice((use_state, use_module_state)))
    )
    if kind == "file":
        buffer = io.BytesIO()
        torch.save(tree, buffer)
        data = change_bytes(buffer.getvalue(), rng)
        return "file of a state", restored(lambda: read_state(data, use))
    for _ in range(rng.choice([1, 1, 2])):
        tree = change_tree(tree, rng)
    return f"{kind}: {_short(tree)}", restored(lambda: use(tree))


def _short(tree: Any) -> str:
    return "\n".join(_lines(tree))[:4000]


def _lines(tree: Any, path: str = "") -> Iterator[str]:
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _lines(value, f"{path}[{key!r}]")
    elif isinstance(tree, Tensor):
        yield f"{path} {tree.dtype} {list(tree.shape)} {tree.layout} {tree.device}"
    else:
        yield f"{path} {tree!r}"[:200]
