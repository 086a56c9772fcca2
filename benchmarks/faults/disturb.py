"""Makes one fault in a running training, and watches until the training continues."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from mixmesh.checkpoint.manifest import NAME

from .journal import Line
from .kinds import Fault, Kind
from .scene import Scene, is_there

STEPS_BESIDE = 5  # steps that must be made during a fault that does not end the training


def disturb(scene: Scene, kind: Kind, fault: Fault, rng: random.Random) -> None:
    """Makes a fault and watches until all machines train again; fills in ``fault`` on the way. Raises Stuck,
    by ``scene.wait``, if the training does not go on."""
    running = scene.running()
    others = {
        line.pid for machine, line in running.items() if kind.has_alive_victim or machine != fault.machine
    }
    victim = {line.pid for machine, line in running.items() if machine == fault.machine}
    made_at_s = time.monotonic()
    fault.what = kind.make(scene, fault.machine, rng)
    if kind.ends_ranks:
        newest = scene.good_checkpoints()[0]
        _see_end(scene, kind, fault, made_at_s, others, victim)
        fault.problem = fault.problem or check_start(newest.name, scene.first_step_since(made_at_s).step)
    else:
        _see_training_on(scene, kind, fault, made_at_s)


def check_start(checkpoint: str, first_step: int) -> str:
    """The problem, if any, of a start whose first step was ``first_step`` although there was a good
    ``checkpoint``."""
    step = int(NAME.fullmatch(checkpoint)[2])
    if first_step > step:
        return ""
    return f"training went back to step {first_step}, and there was {checkpoint}"


def check_saved(checkpoint: str, lines: Sequence[Line], pids: set[int]) -> str:
    """The problem, if any, of ranks ``pids`` that should have saved before they ended, and left a
    ``checkpoint``."""
    step, made = int(NAME.fullmatch(checkpoint)[2]), max(line.step for line in lines if line.pid in pids)
    return "" if step == made else f"step {made} was made last, and the newest is {checkpoint}"


def _see_end(
    scene: Scene, kind: Kind, fault: Fault, made_at_s: float, others: set[int], victim: set[int]
) -> None:
    """Waits for the others to end, for a new start and for all machines in it."""
    if kind.press is not None:

        def is_gone() -> bool:
            if _are_gone(victim):
                return True
            kind.press(scene, fault.machine)
            return False

        scene.wait(is_gone, "the end of the victim")
        made_at_s = time.monotonic()  # the fault is its death
    scene.wait(lambda: _are_gone(others), "the other ranks to notice")
    fault.noticed_s = time.monotonic() - made_at_s
    if kind.is_saved:
        scene.journal.read()
        newest = scene.good_checkpoints()[0]
        # the time at which it got its name
        named_s = time.monotonic() - (time.time() - newest.stat().st_ctime)
        fault.saved_s = max(0.0, named_s - made_at_s)
        fault.problem = check_saved(newest.name, scene.journal.lines, others)
    if kind.undo_when == "noticed":
        kind.undo(scene, fault.machine)
    scene.wait(lambda: scene.first_step_since(made_at_s) is not None, "training again")
    fault.again_s = scene.first_step_since(made_at_s).time_s - made_at_s
    if kind.undo_when == "again":
        kind.undo(scene, fault.machine)
    scene.wait(lambda: scene.is_whole() or scene.is_over, "training on all machines")
    fault.whole_s = time.monotonic() - made_at_s


def _see_training_on(scene: Scene, kind: Kind, fault: Fault, made_at_s: float) -> None:
    """Waits for some steps under the fault, and for its warning if it has one. The ranks stay."""
    running = {line.pid for line in scene.running().values()}
    newest = max((path.name for path in scene.good_checkpoints()), default="")

    def steps_since() -> set[int]:
        return {line.step for line in scene.journal.lines if line.step and line.time_s > made_at_s}

    scene.wait(lambda: bool(steps_since()), "the next step")
    fault.again_s = time.monotonic() - made_at_s
    scene.wait(lambda: len(steps_since()) >= STEPS_BESIDE, "steps under the fault")
    if kind.warning:
        scene.wait(lambda: scene.output.first_with(kind.warning, made_at_s) is not None, "the warning")
        fault.noticed_s = scene.output.first_with(kind.warning, made_at_s) - made_at_s
    kind.undo(scene, fault.machine)
    if kind.warning:
        scene.wait(
            lambda: max((path.name for path in scene.good_checkpoints()), default="") > newest,
            "a checkpoint after the fault",
        )
    if not all(map(is_there, running)) and not scene.is_over:
        fault.problem = "ranks have ended, and had no reason to"


def _are_gone(pids: set[int]) -> bool:
    return not any(map(is_there, pids))
