"""Makes the shares of a run follow its devices: observes between steps, decides, and changes shares."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...errors import MixmeshError
from ...lang.plan_file import MicroBatch, Plan
from ...measure.testbed import enter_device, leave_device
from ...runtime.comm import Comm
from ...runtime.first_rank import everyones, from_first_rank
from ...runtime.parallel import ParallelModel
from ...runtime.reshare import change_shares, why_other_form
from .decide import Decision, Terms, decide
from .observe import Observed, Sensitivity, window_steps
from .replan import OtherPlan, Replanner
from .solve import Solver, sample_ratio

PURPOSE = "rebalance"  # a separate group, for messages that no rank waits for
LEAST_GAIN = 0.05  # share of a step: less is within the error of a prediction
# least seconds assumed for the first change of shares; later ones are expected to take as long as the last
# one
LEAST_PAUSE_S = 0.5
LEAST_LEFT = 100  # steps left in a run of unknown length: as many as were made, but at least this many


@dataclass(frozen=True)
class NewShares:
    """The part of a plan that differs under other shares."""

    ratios: tuple[tuple[str, tuple[float, ...]], ...]
    micro_batches: tuple[MicroBatch, ...] | None
    predicted_step_s: float
    predicted_peak_memory_bytes: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> NewShares:
        peaks = plan.predicted_peak_memory_bytes
        return cls(plan.program.ratios, plan.micro_batches, plan.predicted_step_s, peaks)

    def on(self, plan: Plan) -> Plan:
        """A plan like ``plan`` with these shares."""
        return replace(
            plan,
            program=plan.program.changed(ratios=self.ratios),
            micro_batches=self.micro_batches,
            predicted_step_s=self.predicted_step_s,
            predicted_peak_memory_bytes=self.predicted_peak_memory_bytes,
            measured_step_s=None,
        )


@dataclass(frozen=True)
class Change:
    """New shares that take effect after ``at_step`` steps, and each rank's expected seconds of computing
    then."""

    at_step: int
    plan: Plan
    own_s: tuple[float, ...]
    cause: str = ""


class Followable(Protocol):
    """This rank's batches. ``follow(plan)`` makes another plan cut them after the next ``num_ahead``;
    ``follow`` is None if that is impossible."""

    @property
    def follow(self) -> Callable[[Plan], object] | None: ...
    @property
    def num_ahead(self) -> int: ...


class RunBalancer:
    """The balancer of one run. ``solver`` is used on the first rank, and may be None on the others. ``say``
    is called with each decision in one line, on every rank. ``num_steps`` is the number of steps of the run,
    None if open. ``on_window`` is called with the step and every rank's own seconds at the end of a window,
    ``on_change`` with the step, the pause and the cause of a change of shares. ``why_not`` is called on every
    rank and returns why shares cannot change now, empty if they can. ``replanner`` is asked on the first rank
    for a plan of another form."""

    def __init__(
        self,
        solver: Solver | None,
        num_steps: int | None,
        say: Callable[[str], None] = lambda _: None,
        settings: Sensitivity | None = None,
        on_window: Callable[[int, list[float]], object] = lambda step, own_s: None,
        on_change: Callable[[int, float, str], object] = lambda step, pause_s, cause: None,
        why_not: Callable[[], str] = lambda: "",
        replanner: Replanner | None = None,
    ) -> None:
        self._why_not, self._replanner = why_not, replanner
        self._made_at = time.perf_counter()
        self._restart_s = 0.0  # expected seconds of a restart in these processes
        self.following: OtherPlan | None = None  # a plan of another form under which to continue
        self._on_window, self._on_change = on_window, on_change
        self._solver, self._num_steps, self._say = solver, num_steps, say
        self._settings = settings or Sensitivity()
        self._pause_s = 0.0  # seconds of the last change of shares
        self._times: list[tuple[float, float]] = []  # (own, total) seconds of each step in this window
        self._length = self._settings.least_steps
        self._pending: tuple[dist.Work | None, torch.Tensor, torch.Tensor] | None = None
        self._change: Change | None = None
        # skips the first window, and those after a change, because they include compilation
        self._skips_window = True
        self._since = 0  # the first step of the windows that count
        self.decisions: list[Decision] = []
        self.changes: list[dict[str, Any]] = []

    def begin(self, model: ParallelModel, optimizer: torch.optim.Optimizer, feed: Followable) -> None:
        """Notes the seconds that each rank is expected to compute. Collective."""
        self._model, self._optimizer, self._feed = model, optimizer, feed
        comm = model.comm
        comm.add([(PURPOSE, comm.everyone)], backend="gloo")
        with self._off_device(), comm.call("rebalancing"):
            expected_s = from_first_rank(lambda: self._asked.planned_own_s(self._plan))
        self._observed = Observed(expected_s)
        # a restart begins with saving a checkpoint
        self._restart_s = LEAST_PAUSE_S + 2 * (time.perf_counter() - self._made_at)

    def after_step(self, num_steps: int, step_s: float, own_s: float) -> bool:
        """Observes a step, and changes shares if that was decided. Returns True if the training should stop
        here and continue from a checkpoint under another plan (``following``). Collective."""
        self._observe(num_steps, step_s, own_s)
        return self.following is not None

    def stay(self) -> None:
        """Continues under the same plan, because no checkpoint could be written."""
        self.following = None
        self._say("the checkpoint could not be written: the training goes on under the same plan")

    def _observe(self, num_steps: int, step_s: float, own_s: float) -> None:
        if self._change is not None:
            if self.is_due(num_steps):
                self.apply()
            return
        if self._pending is not None:
            self._window_is_over(num_steps, self._pending[2])
            if self._change is not None and self.is_due(num_steps):
                self.apply()
            return
        self._times.append((own_s, step_s))
        if len(self._times) >= self._length:
            self._send()

    def is_due(self, num_steps: int) -> bool:
        """Whether shares change after ``num_steps`` steps, so that the next batch is cut by the new ones."""
        return self._change is not None and num_steps == self._change.at_step

    def close(self) -> None:
        """Releases the model and its optimizer, when they are no longer trained."""
        del self._model, self._optimizer, self._feed

    def followed_by(self, later: RunBalancer | None) -> RunBalancer:
        """The balancer of the plan that followed, with the decisions of this one added. If that has none,
        this one itself, without its request for another plan."""
        if later is None:
            self.following = None
            return self
        later.decisions, later.changes = self.decisions + later.decisions, self.changes + later.changes
        return later

    def figures(self) -> dict[str, Any]:
        """Decisions with their numbers, and the changes of shares with the seconds that each held up the
        training."""
        told = [{**asdict(d.terms), "reason": d.reason, "is_applied": d.is_applied} for d in self.decisions]
        return {"rebalancing": {"decisions": told, "changes": self.changes}}

    @property
    def _plan(self) -> Plan:
        return self._model._runtime.forms.plan

    @property
    def _asked(self) -> Solver:
        """The solver, on the first rank."""
        assert self._solver is not None
        return self._solver

    @property
    def _comm(self) -> Comm:
        return self._model.comm

    def _send(self) -> None:
        """Sends the medians of this window to all ranks; they are read one step later, when they have
        arrived."""
        own_s, step_s = (statistics.median(column) for column in zip(*self._times))
        self._times.clear()
        mine = torch.tensor([own_s, step_s], dtype=torch.float64)
        table = torch.zeros(self._comm.world_size, 2, dtype=torch.float64)
        channel = self._comm.channel(self._comm.everyone, "own seconds of a step", PURPOSE)
        self._pending = channel.start(dist.all_gather, list(table.unbind()), mine), mine, table

    def end(self) -> None:
        """Waits for the last message. Collective."""
        if self._pending is not None:
            (work, _, _), self._pending = self._pending, None
            self._comm.channel(self._comm.everyone, "own seconds of a step", PURPOSE).finish(work)

    def _window_is_over(self, num_steps: int, table: torch.Tensor) -> None:
        with self._comm.call("the end of a window"):
            self.end()
        own_s, step_s = table[:, 0].tolist(), max(table[:, 1].tolist())
        self._on_window(num_steps, own_s)
        self._length = window_steps(step_s, self._settings)
        if self._skips_window:
            self._skips_window, self._since = False, num_steps
            return
        self._observed = self._observed.add(own_s, self._settings)
        if self._observed.drifts(step_s, self._settings):
            self._decide(num_steps, step_s)

    def _decide(self, num_steps: int, step_s: float) -> None:
        """Makes the first rank's decision about a drift on all ranks. Collective."""
        with self._off_device(), self._comm.call("rebalancing"):
            why_not = next(filter(None, everyones(self._why_not())), "")
            outcome = from_first_rank(lambda: self._decision(num_steps, step_s, why_not))
        decision, shares, own_s, self.following = outcome
        self.decisions.append(decision)
        self._say(decision.text())
        self._since = num_steps
        if not decision.is_applied or self.following is not None:
            self._observed = self._observed.settled()
            return
        follow = self._feed.follow
        assert shares is not None and follow is not None  # the decision is to change shares
        plan = shares.on(self._plan)
        follow(plan)
        self._change = Change(num_steps + self._feed.num_ahead, plan, own_s, decision.cause)

    def _decision(
        self, num_steps: int, step_s: float, why_not: str
    ) -> tuple[Decision, NewShares | None, tuple[float, ...], OtherPlan | None]:
        """The decision: with new shares and each rank's own seconds under them if it changes shares, or with
        a plan of another form. ``why_not`` says why nothing may change, on any rank."""
        decision, shares, own_s = self._in_place(num_steps, step_s, why_not)
        if self._replanner is not None and not why_not:
            observed_s = self._observed.own_s()
            is_other = lambda made: bool(why_other_form(self._plan, made, self._optimizer))  # noqa: E731
            with suppress(MixmeshError):  # for instance if nothing fits: then only shares may change
                other = self._replanner.better(
                    self._asked, self._plan, observed_s, decision, self._restart_s, LEAST_GAIN, is_other
                )
                if other is not None:
                    return other[0], None, (), other[1]
        return decision, shares, own_s, None

    def _in_place(
        self, num_steps: int, step_s: float, why_not: str
    ) -> tuple[Decision, NewShares | None, tuple[float, ...]]:
        """The decision on other shares for the same program."""
        plan, own_s = self._plan, self._observed.own_s()
        name = sample_ratio(plan.program) or plan.program.main_ratio
        shares = plan.program.ratio_of[name]
        left = None if self._num_steps is None else self._num_steps - num_steps
        terms = Terms(
            num_steps,
            num_steps - self._since,
            self._asked.factors(plan, own_s),
            shares,
            shares,
            step_s,
            step_s,
            max(num_steps, LEAST_LEFT) if left is None else left - self._feed.num_ahead,
            self._pause_s,
        )
        if why_not:
            return decide(replace(terms, problem=why_not), LEAST_GAIN), None, ()
        try:
            solved = self._asked.solve(plan, own_s)
            problem = why_other_form(plan, solved.plan, self._optimizer)
        except MixmeshError as error:
            return decide(replace(terms, problem=error.message), LEAST_GAIN), None, ()
        pause_s = self._pause_s or LEAST_PAUSE_S + self._asked.pause_s(solved.moved_bytes)
        terms = replace(
            terms,
            new_shares=solved.plan.program.ratio_of[name],
            new_step_s=step_s * solved.relative_step,
            pause_s=pause_s,
            problem=problem,
        )
        return decide(terms, LEAST_GAIN), NewShares.of(solved.plan), solved.own_s

    def apply(self) -> None:
        """Changes shares, if a change was decided. Collective."""
        started, change = time.perf_counter(), self._change
        if change is None:
            return
        with self._off_device():
            change_shares(self._model, self._optimizer, change.plan)
        self._pause_s = time.perf_counter() - started
        self.changes.append({"step": change.at_step, "pause_s": self._pause_s})
        self._on_change(change.at_step, self._pause_s, change.cause)
        self._observed = self._observed.moved(change.own_s, self._settings)
        self._change, self._skips_window = None, True

    @contextmanager
    def _off_device(self) -> Iterator[None]:
        """A context in which an emulated device's quota is not used, because solving and moving are work of
        the host."""
        was_on = leave_device()
        try:
            yield
        finally:
            if was_on:
                enter_device()
