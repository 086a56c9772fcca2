"""The decisions of callbacks, made once as on one device: what one rank's callback decides, all ranks do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import TrainerControl
from transformers.trainer_callback import CallbackHandler

from ....base.patch import put_on
from ....runtime.first_rank import largest

# events that every rank comes to, after which the Trainer looks at what was decided
ALWAYS = frozenset(("on_step_end", "on_substep_end", "on_epoch_end", "on_save"))
# others that callbacks bring about on one rank too, by trainer.log(...)
IN_TURN = frozenset(("on_log", "on_evaluate"))


def share_decisions(
    handler: CallbackHandler, trains: Callable[[], bool], in_turn: Callable[[], bool]
) -> None:
    """Makes callbacks decide for all ranks while ``trains()``. ``in_turn`` returns whether the events to log
    and to evaluate are those that all ranks come to."""
    call_event = handler.call_event

    def call_and_share(event: str, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> Any:
        decided = call_event(event, args, state, control, **kwargs)
        is_met = event in ALWAYS or (event in IN_TURN and in_turn())
        return of_any_rank(decided) if is_met and trains() else decided

    put_on(handler, "call_event", call_and_share)


def of_any_rank(control: TrainerControl) -> TrainerControl:
    """Returns the decisions that at least one rank has made. Collective."""
    own = asdict(control)
    flags = torch.tensor([bool(flag) for flag in own.values()], dtype=torch.uint8)
    of_all = largest(flags, "the decisions of callbacks").tolist()
    return replace(control, **{name: bool(flag) for name, flag in zip(own, of_all)})
