"""The arguments of an SFTTrainer that a parallel one cannot follow exactly, with an alternative for each."""

from __future__ import annotations

from typing import Any

import trl

from ....errors import InputError

TESTED = (1, 16)  # members of SFTTrainer that are read here have their names since this version
WHOLE_ROWS = 'packing_strategy="wrapped", or packing=False and padding_free=False'


def check_version() -> None:
    """Raises InputError for a version of TRL whose SFTTrainer has other members."""
    major, minor, *_ = trl.__version__.split(".")
    if int(major) != TESTED[0] or int(minor) < TESTED[1]:
        raise InputError(
            "this version of TRL has another SFTTrainer",
            expected="TRL 1.16 or a later 1.x",
            got=f"TRL {trl.__version__}",
            hint="pip install 'trl>=1.16,<2'",
        )


def check_args(args: Any) -> None:
    """Raises InputError for the first argument that is refused."""
    packs_tokens = getattr(args, "packing", False) and args.packing_strategy != "wrapped"
    if packs_tokens or getattr(args, "padding_free", False):
        raise InputError(
            "a batch without padding is one sequence, whose samples cannot be dealt out to devices",
            expected="a row for each sample, or for each block of tokens",
            got=f"packing_strategy={args.packing_strategy!r}" if packs_tokens else "padding_free=True",
            hint=WHOLE_ROWS,
        )
    if getattr(args, "activation_offloading", False):
        raise InputError(
            "a parallel SFTTrainer does not take activation_offloading",
            expected="it left out",
            got="activation_offloading=True",
            hint="gradient_checkpointing=True: the plan decides what is kept and what is computed again",
        )
