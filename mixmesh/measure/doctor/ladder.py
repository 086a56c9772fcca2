"""The equivalence ladder on the available devices: a small model is planned by every planner, for invented
unequal devices, and trained for a step. Its loss and gradients must equal those of one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...cluster import Cluster, Device, Machine
from ...errors import InputError, VerificationError
from ...frontend.trace import Traced, trace
from ...lang.plan_file import Plan
from ...planner import make_plan
from ...planner.learned import has_torch_geometric
from ...planner.planners import ROWS
from ...runtime.parallel import parallelize
from ..verification import TOLERANCE_F64
from ..verification.compare import Outcome, compare
from .ground import Ground, count
from .meeting import Meeting

SAMPLES_PER_RANK, LENGTH, WORDS, WIDTH = 6, 4, 24, 16
ENOUGH_DEVICES = 3  # number of devices with which every kind of plan is possible
SEARCH_S = 0.3  # seconds for open-ended planners
# devices so slow relative to their links that it pays to cut even a small model
SLOW_FLOP_PER_S, FAST_LINK_BYTES_PER_S, MEMORY_BYTES = 1e6, 1e12, 2**30


NAMES = tuple(row.name for row in ROWS)
LEARNED = tuple(row.name for row in ROWS if row.is_learned)
NEEDY = tuple(row.name for row in ROWS if row.needs)


class Small(nn.Module):
    """A transformer block in miniature."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of predicting the next words."""
        x = self.embedding(words)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + functional.scaled_dot_product_attention(q, k, v)
        x = x + self.down(functional.gelu(self.up(x)))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Step:
    """The model before any step, the batch, and the outcome of a step on this rank's device alone. Only the
    first rank, which plans, has the traced model."""

    state: dict[str, Tensor]
    batch: dict[str, Tensor]
    outcome: Outcome
    traced: Traced | None


def ladder(ground: Ground) -> str:
    """Checks that every planner's plan trains as one device does, each within its own time limit."""
    planners = [name for name in NAMES if name not in LEARNED or has_torch_geometric()]
    steps: list[Step] = []

    def step_alone() -> None:
        ground.take_device()
        steps.append(one_device(ground.device, ground.meeting.world_size, ground.meeting.rank == 0))

    ground.meeting.gather("the step on one device", step_alone)
    (step,) = steps
    cluster = made_up(ground.inventory.machines)
    worst, without = 0.0, []
    for name in planners:
        ground.progress(f"ladder, {name}")
        plan = plan_of_first(ground.meeting, step.traced, cluster, name)
        if plan is None:
            without.append(name)
            continue
        told = ground.meeting.gather_together(f"the step of {name}", partial(errors_of, step, plan, ground))
        worst = max(worst, *(error for error, _ in told))
        check_equal(name, told)
    left = [name for name in LEARNED if name not in planners]
    notes = [f"{', '.join(without)} need more devices"] if without else []
    notes += [f"{', '.join(left)} need torch_geometric"] if left else []
    number = count(len(planners) - len(without), "planner")
    return "; ".join([f"{number}: loss and gradients as on one device, within {worst:.0e}", *notes])


def one_device(device: torch.device, world_size: int, is_first: bool) -> Step:
    """The step on one device, in float64. All ranks draw the same random numbers."""
    generator = torch.Generator().manual_seed(0)
    size = (SAMPLES_PER_RANK * world_size, LENGTH)
    batch = {key: torch.randint(WORDS, size, generator=generator) for key in ("words", "targets")}
    model = Small().double()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    traced = trace(model, batch) if is_first else None
    model.to(device)
    batch = {key: value.to(device) for key, value in batch.items()}
    loss = model(**batch)
    loss.backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return Step(state, batch, Outcome(loss.item(), gradients, {}), traced)


def made_up(machines: Sequence[Sequence[int]]) -> Cluster:
    """An invented cluster with as many devices as there are ranks, each slower than the one before. One
    machine counts as two, so that all kinds of plans are tried."""
    if len(machines) == 1 and len(machines[0]) > 1:
        ranks = machines[0]
        machines = ranks[: (len(ranks) + 1) // 2], ranks[(len(ranks) + 1) // 2 :]
    rate = FAST_LINK_BYTES_PER_S
    batch = tuple(
        Machine(f"machine {index}", tuple(map(slow_device, ranks)), rate, 0.0, rate)
        for index, ranks in enumerate(machines)
    )
    return Cluster("made up", batch, rate, 0.0)


def slow_device(rank: int) -> Device:
    """A device so slow that everything other than its computing takes negligible time."""
    rate = SLOW_FLOP_PER_S / (1 + rank / 2)
    return Device(f"device {rank}", rate, MEMORY_BYTES, rate, kind="cpu")


def plan_of_first(meeting: Meeting, traced: Traced | None, cluster: Cluster, planner: str) -> Plan | None:
    """The plan that the first rank makes; None if there are too few devices for this planner."""

    def make() -> str:
        if meeting.rank:
            return ""
        assert traced is not None  # on the first rank
        try:
            return str(make_plan(traced, cluster, planner=planner, search_s=SEARCH_S))
        except InputError:
            if planner in (*NEEDY, *LEARNED) and cluster.world_size < ENOUGH_DEVICES:
                return ""
            raise

    text = meeting.gather(f"the planning of {planner}", make)[0]
    return Plan.parse(text) if text else None


def errors_of(step: Step, plan: Plan, ground: Ground) -> tuple[float, str]:
    """The largest relative error of loss and gradients in a step under ``plan``, and where it occurs.
    Collective."""
    model = Small().double()
    model.load_state_dict(step.state)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # moves each parameter by its gradient
    parallel, optimizer = parallelize(
        model,
        optimizer,
        plan,
        device=ground.device,
        timeout_s=ground.group_timeout_s,
        heartbeat_s=0,
        check_model=False,
    )
    loss = parallel(**step.batch)
    loss.backward()
    optimizer.step()
    after = parallel.full_state_dict()
    gradients = {name: step.state[name] - after[name].cpu() for name in step.outcome.gradients}
    difference = compare(Outcome(loss.item(), gradients, {}), step.outcome)
    parallel.comm.close()
    if difference.loss >= difference.largest:
        return difference.loss, "the loss"
    return difference.largest, f"the gradient of {difference.worst}"


def check_equal(planner: str, told: list) -> None:
    """Raises VerificationError if a rank's step differs from one device's."""
    wrong = {rank: error for rank, error in enumerate(told) if not error[0] <= TOLERANCE_F64}
    if wrong:
        rank = min(wrong)
        error, where = wrong[rank]
        raise VerificationError(
            f"a step by the plan of {planner} is not that of one device: {where} on rank {rank}",
            expected=f"a relative error of at most {TOLERANCE_F64:.0e}",
            got=f"{error:.1e}",
            hint=(
                "mixmesh verify of a plan right, and this wrong: the devices or their links compute wrongly",
            ),
            ranks=tuple(wrong),
        )
