"""The figures that ``nvidia-smi`` reports for cards: driver, clocks and power limits."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

import torch

from ...runtime.accelerator import card_facts

SMI = "nvidia-smi"
SMI_S = 20.0  # nvidia-smi answers in a second; if it hangs, so does the driver
FIELDS = ("uuid", "driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "power.default_limit")


@dataclass(frozen=True)
class Card:
    """A card's driver, its current and maximum clock in MHz, and its current and default power limit in W;
    None for figures that the card does not report."""

    uuid: str
    driver: str
    clock_mhz: float | None
    max_clock_mhz: float | None
    power_limit_w: float | None
    default_power_w: float | None


@cache
def read_cards() -> tuple[Card, ...]:
    """The cards of this machine as listed by ``nvidia-smi``; none if there is no such command, or it
    fails."""
    command = shutil.which(SMI)
    if command is None:
        return ()
    query = [command, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return cards_of(answer.stdout)


def cards_of(text: str) -> tuple[Card, ...]:
    """The cards in a CSV table whose columns are ``FIELDS``."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return tuple(
        Card(uuid, driver, *map(number, figures))
        for uuid, driver, *figures in (row for row in rows if len(row) == len(FIELDS))
    )


def number(cell: str) -> float | None:
    """The number in a cell; None for ``[N/A]`` and the like."""
    try:
        return float(cell)
    except ValueError:
        return None


def card_of(device: torch.device) -> Card | None:
    """The entry of ``device``, found by its uuid; None if it is not listed, for instance a part of a card."""
    uuid = card_facts(device).uuid
    return next((card for card in read_cards() if uuid and card.uuid.removeprefix("GPU-") == uuid), None)


def driver_version() -> str | None:
    """The driver version of this machine's cards; None if unknown."""
    cards = read_cards()
    return cards[0].driver if cards else None
