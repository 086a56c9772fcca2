"""This process's place in its launch, as torchrun writes it into the environment."""

from __future__ import annotations

import os

from ..errors import InputError


def rank_and_world_size() -> tuple[int, int]:
    """Returns ``RANK`` and ``WORLD_SIZE``; 0 and 1 where they are not set. Raises InputError for values that
    no launcher sets."""
    texts = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        rank, world_size = int(texts["RANK"] or 0), int(texts["WORLD_SIZE"] or 1)
    except ValueError:
        raise _unusable(texts) from None
    if not 0 <= rank < world_size:
        raise _unusable(texts)
    return rank, world_size


def store_address() -> tuple[str, int]:
    """Returns ``MASTER_ADDR`` and ``MASTER_PORT``, which a launcher has set. Raises InputError unless the
    second is the number of a port. A rank that is alone may have 0, any port that is free."""
    address, text = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    least = 0 if os.environ.get("WORLD_SIZE") == "1" else 1
    if not (text.strip().isascii() and text.strip().isdecimal() and least <= int(text) < 2**16):
        raise InputError(
            "the environment does not say at which port the ranks meet",
            expected="a MASTER_PORT from 1 to 65535, alike on all ranks",
            got=f"MASTER_PORT={text}",
            hint="export MASTER_PORT=29500",
        )
    return address, int(text)


def _unusable(texts: dict[str, str | None]) -> InputError:
    told = [f"no {name}" if text is None else f"{name}={text}" for name, text in texts.items()]
    return InputError(
        "the environment does not say which of the processes this one is",
        expected="a RANK from 0 to WORLD_SIZE - 1, as torchrun sets both",
        got=", ".join(told),
        hint=("torchrun --nproc-per-node N ...", "for one device: unset RANK WORLD_SIZE"),
    )
