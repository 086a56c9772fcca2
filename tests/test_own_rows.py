"""What a loop makes of a rank's own rows: right, refused as an input, or warned of as a number."""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, normalize, one_hot

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import InputError
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import REPLICATE, Program
from mixmesh.runtime.comm import Comm
from mixmesh.runtime.layout import Layout
from mixmesh.runtime.shard_tensor import ShardTensor, shard
from mixmesh.runtime.shard_whole import Whole
from mixmesh.runtime.shards import Stored
from mixmesh.search.baselines import data_parallel
from mixmesh.training.preparation.own_rows import WATCHED_BATCHES, OwnRows, RowWatch

TWO = """
name = "two"
[[machine]]
devices = [{ cpu_share = 0.5 }, { cpu_share = 0.25 }]
"""
SHARES = (0.625, 0.375)


class Loss(torch.nn.Linear):
    def forward(self, x, y):
        return cross_entropy(super().forward(x), y)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(20.0).reshape(5, 4) % 3, torch.arange(5) % 3


@lru_cache
def program(shares: tuple[float, ...]) -> Program:
    batch = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
    return data_parallel(trace(Loss(4, 3), batch).graph, CostModel(Cluster.parse(TWO)), shares)


def watch(rank: int = 0, shares=SHARES) -> RowWatch:
    return RowWatch(SimpleNamespace(program=program(shares)), rank)


ROW_BY_ROW = (
    lambda x: (x - 0.5) / 2,
    lambda x: x.to(torch.float64).mul_(2),
    lambda x: x - x.mean(1, keepdim=True),
    lambda x: normalize(x).softmax(-1),
    lambda x: torch.cat([x, x.flip(-1)], 1),
    lambda x: x[:, :2],
    lambda x: x[x[:, 0] > 0],
    lambda x: x.view(-1, 2).relu().view(5, 4),
    lambda x: x.roll(1, 1).sort(dim=1).values,
    lambda x: x.unsqueeze(0).squeeze(0).contiguous(),
    lambda x: one_hot(x.long()).sum(2),
)
OF_SEVERAL_ROWS = (
    lambda x: x - x.mean(0),
    lambda x: x / x.max(),
    lambda x: x.clone().sub_(x.std(dim=0)),
    lambda x: x.softmax(0),
    lambda x: x.cumsum(dim=0),
    lambda x: x[:3],
    lambda x: x[torch.tensor([4, 3, 2, 1, 0])],
    lambda x: x.flip(0),
    lambda x: 0.3 * x + 0.7 * x.roll(1, 0),
    lambda x: torch.cat([x, x.flip(-1)]),
    lambda x: x.chunk(2)[0],
    lambda x: x.repeat(2, 1),
)


@pytest.mark.parametrize("change", ROW_BY_ROW)
def test_rows_that_are_changed_each_by_itself_are_taken(change):
    """With the values of plain tensors, as a plain tensor."""
    x, y = watch().watched(rows())
    (made,), named = watch().on_call((change(x),), {"y": y})
    assert type(made) is type(named["y"]) is torch.Tensor
    assert torch.equal(made, change(rows()[0]))


@pytest.mark.parametrize("change", OF_SEVERAL_ROWS)
def test_inputs_that_are_made_of_several_rows_are_refused(change):
    x, _ = watch().watched(rows())
    with pytest.raises(InputError, match="own rows, or of some by their place") as caught:
        watch().on_call((change(x),), {})
    assert "model, optimizer, _ = mixmesh.prepare" in str(caught.value) and "inputs=" in str(caught.value)


READ = (
    lambda x, y: (torch.zeros(5) == y).sum().item(),
    lambda x, y: float(0 + (x.argmax(1) == y).float().sum()),
    lambda x, y: f"{cross_entropy(torch.zeros(5, 3), y):.3f}",
    lambda x, y: (x.argmax(1).view(-1) == y.view(-1)).double().mean().tolist(),
)


@pytest.mark.parametrize("read", READ)
def test_numbers_made_of_own_rows_are_warned_of_once(read):
    watched = watch()
    x, y = watched.watched(rows())
    with pytest.warns(UserWarning, match="of a rank's own 5 rows") as found:
        assert read(x, y) == read(*rows())
        read(x, y)
    assert len(found) == 1
    x, y = watch(rank=1).watched(rows())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(x, y)  # the first rank says it


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_numbers_that_the_script_sums_over_ranks_are_not_warned_of(alone):
    """Unlike means over ranks that have other numbers of rows."""
    _, y = watch().watched(rows())
    count, most, mean = (y != 0).sum(), y.max(), y.double().mean()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.all_reduce(count)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        assert (count.item(), float(most / 2)) == (3, 1.0)
    dist.all_reduce(mean)
    with pytest.warns(UserWarning, match=r"mean\(\) has made of a rank's own 5 rows"):
        mean.item()


def test_a_number_of_own_rows_that_changes_a_piece_of_a_gradient_is_warned_of():
    whole = Whole(Stored("w", (4,), torch.float32, Layout(REPLICATE, (0,))), Comm(0, 1, "cpu", 60.0, {}))
    for change in (lambda g, n: g.div_(n), lambda g, n: torch._foreach_div_([g], n), lambda g, n: g / n):
        _, y = watch().watched(rows())
        piece = shard(torch.ones(4), whole)
        with pytest.warns(UserWarning, match=r"sum\(\) has made of a rank's own 5 rows"):
            change(piece, (y != 0).sum())
        assert type(piece) is ShardTensor


class Meter:
    def __init__(self) -> None:
        self.total = 0.0

    def update(self, value: float, n: int = 1) -> None:
        self.total += value * n


def weighs(x, loss):
    total = 0.0
    total += loss.item() * x.size(0)
    return total


def weighs_before_a_mean(x, loss):
    total = 0.0
    total += loss.item() * len(x) / 20
    return total


def weighs_by_a_name(x, loss):
    size = x.shape[0]
    sizes = [size]
    return loss.item() * size + sum(sizes)


def weighs_in_a_list(x, loss):
    values = []
    values.append(len(x) * float(loss))
    return sum(values)


def counts(x, loss):
    count = 0
    count += len(x)
    return count


def counts_in_a_meter(x, loss):
    meter = Meter()
    meter.update(loss.item(), x.size(0))
    return meter.total


def counts_in_a_meter_by_keyword(x, loss):
    meter = Meter()
    meter.update(loss.item(), n=x.shape[0])
    return meter.total


COUNTING = (
    weighs,
    weighs_before_a_mean,
    weighs_by_a_name,
    weighs_in_a_list,
    counts,
    counts_in_a_meter,
    counts_in_a_meter_by_keyword,
)


@pytest.mark.parametrize("read", COUNTING)
def test_samples_that_are_counted_by_own_rows_are_warned_of_once(read):
    """With the line, and the number that the script asked for."""
    x, _ = watch().watched(rows())
    loss = torch.tensor(2.0)
    with pytest.warns(UserWarning, match="counted by a rank's own 5 rows") as caught:
        assert read(x, loss) == read(rows()[0], loss)
        read(x, loss)
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert caught[0].filename == __file__
    first = read.__code__.co_firstlineno
    assert first < caught[0].lineno < first + 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(rows()[0], loss)  # a whole batch
        read(watch(rank=1).watched(rows())[0], loss)  # the first rank says it


@pytest.mark.parametrize("kind", [list, tuple])
def test_words_that_are_counted_by_own_rows_are_warned_of(kind):
    """As tensors are, and given to a model as they came."""
    given, loss = kind(f"{n}.jpg" for n in range(5)), torch.tensor(2.0)
    of = watch()
    _, batch = of.watched((rows()[0], {"name": given}))
    words = batch["name"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            isinstance(words, kind) and words == given and words[1] == "1.jpg" and list(words) == list(given)
        )
        assert torch.zeros(len(words), 2).shape == (5, 2) and list(range(len(words))) == [0, 1, 2, 3, 4]
        (own,), _ = of.on_call((batch,), {})
        assert type(own["name"]) is kind and own["name"] == given
    with pytest.warns(UserWarning, match="counted by a rank's own 5 rows") as caught:
        assert counts(words, loss) == 5
    assert len(caught) == 1 and caught[0].filename == __file__
    unequal = watch().watched((rows()[0], kind(["a", "b"])))[1]
    assert type(unequal) is kind, "no word for each row"


def test_sizes_that_shape_tensors_are_not_warned_of():
    x, _ = watch().watched(rows())
    loss = torch.tensor(2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert x.view(x.size(0), -1).shape == (5, 4)
        size = len(x)
        assert torch.zeros(size, 2).shape == (5, 2)
        x = x + torch.zeros(len(x), 1)
        scaled = loss * 3 / x.size(1) if x.ndim > 3 else loss
        assert scaled == loss and list(range(x.size(0))) == [0, 1, 2, 3, 4]


def test_what_is_not_a_number_of_several_rows_is_not_warned_of():
    x, y = watch().watched(rows())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert y.tolist() == rows()[1].tolist() and x[0, 0].item() == 0 and "tensor" in repr(x.sum(1))
        assert x.shape == (5, 4) and x.numpy().shape == (5, 4) and len(x) == x.size(0) == 5


def test_only_the_first_batches_of_a_rank_with_some_of_the_rows_are_watched():
    batches = list(watch().watching(iter([{"x": rows()[0], "name": "a", "scale": torch.ones(())}] * 5)))
    assert [isinstance(b["x"], OwnRows) for b in batches] == [n < WATCHED_BATCHES for n in range(5)]
    assert all(type(b["scale"]) is torch.Tensor and b["name"] == "a" for b in batches)
    whole, nothing = watch(shares=(1.0, 0.0)), watch(rank=1, shares=(1.0, 0.0))
    assert all(type(w.watched(rows())[0]) is torch.Tensor for w in (whole, nothing))
