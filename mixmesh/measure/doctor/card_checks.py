"""Checks the reports of cards: clocks, power limits, and which cards reach each other. Without a GPU each
check reports that there is none."""

from __future__ import annotations

from dataclasses import asdict

import torch

from ...base.units import ranks_text
from ...errors import CollectiveError
from ...runtime.accelerator import device_count, is_accelerator, reaches, synchronize
from .cards import Card, card_of
from .ground import Ground, Note

ABSENT = "not there"
FULL_POWER = 0.95  # share of the default power limit below which a card is slower than its datasheet
NO_GPU = "not there: no rank has a GPU"
COPIED = 2**20  # numbers in a copy, enough for several packets


def clocks_and_power(ground: Ground) -> str | Note:
    """Clocks and power limits of all cards: a lowered limit makes a card slower than planned."""

    def make() -> dict | None:
        card = card_of(ground.device) if is_accelerator(ground.device) else None
        return None if card is None else asdict(card)

    told = ground.meeting.gather("the look at clocks", make)
    cards = [None if fields is None else Card(**fields) for fields in told]
    ground.columns["clock"] = [clock_text(card) for card in cards]
    ground.columns["power limit"] = [power_text(card) for card in cards]
    if all(device.kind != "gpu" for device in ground.devices):
        return NO_GPU
    if not any(cards):
        return Note("not there: nvidia-smi does not list the cards", ("install nvidia-smi, of the driver",))
    lowered = {rank: card for rank, card in enumerate(cards) if card is not None and is_lowered(card)}
    if lowered:
        card = next(iter(lowered.values()))
        return Note(
            f"the limit of power of {ranks_text(list(lowered))} is lowered: slower than the datasheet",
            (f"sudo nvidia-smi -i {card.uuid} -pl {card.default_power_w:.0f}, or mixmesh profile",),
            tuple(lowered),
        )
    return "limits of power as the cards were made"


def is_lowered(card: Card) -> bool:
    """Whether a card's power limit is below its default."""
    if card.power_limit_w is None or card.default_power_w is None:
        return False
    return card.power_limit_w < FULL_POWER * card.default_power_w


def clock_text(card: Card | None) -> str:
    """A card's clock now and at most."""
    if card is None or card.max_clock_mhz is None:
        return ABSENT
    now = "?" if card.clock_mhz is None else f"{card.clock_mhz:.0f}"
    return f"{now} of {card.max_clock_mhz:.0f} MHz"


def power_text(card: Card | None) -> str:
    """A card's current and default power limit."""
    if card is None or card.power_limit_w is None:
        return ABSENT
    default_text = "" if card.default_power_w is None else f" of {card.default_power_w:.0f}"
    return f"{card.power_limit_w:.0f}{default_text} W"


def peer_to_peer(ground: Ground) -> str | Note:
    """Reports which cards of a machine reach each other's memory, and checks that a copy from each rank's
    card to the next card visible to its process is right, even if it goes through the host."""

    def make() -> list[int] | None:
        if not is_accelerator(ground.device):
            return None
        own, seen = ground.device.index, range(device_count())
        following = torch.device(ground.device.type, (own + 1) % len(seen))
        if len(seen) > 1 and not is_copied(ground.device, following):
            raise CollectiveError(
                f"a copy from card {own} to card {(own + 1) % len(seen)} of the machine arrives changed",
                expected="the numbers that were sent",
                got="others",
                hint=(
                    "turn ACS and the IOMMU off in the firmware (NCCL's troubleshooting page says how)",
                    "or NCCL_P2P_DISABLE=1",
                ),
            )
        return [n for n in seen if n != own and reaches(ground.device, n)]

    told = ground.meeting.gather("the copies between cards", make)
    ground.columns["reaches cards"] = [reach_text(peers) for peers in told]
    with_gpu = [rank for rank, peers in enumerate(told) if peers is not None]
    if not with_gpu:
        return NO_GPU
    several = [r for ranks in ground.inventory.machines if len(ranks) > 1 for r in ranks]
    alone = tuple(rank for rank in with_gpu if rank in several and not told[rank])
    if alone:
        return Note(
            f"cards of {ranks_text(list(alone))} reach no other: what they exchange goes through the host",
            ("nvidia-smi topo -m shows the paths; the cluster file's link_gbit_per_s is to be as measured",),
            alone,
        )
    return "every card reaches others of its machine" if several else "one card for each machine"


def reach_text(peers: list[int] | None) -> str:
    """Names the cards that one card reaches: its row of the matrix."""
    if peers is None:
        return ABSENT
    return " ".join(map(str, peers)) or "none"


def is_copied(source: torch.device, target: torch.device) -> bool:
    """Whether numbers arrive unchanged at the other card."""
    sent = torch.arange(COPIED, device=source, dtype=torch.int32)
    there = sent.to(target)
    synchronize(source)
    synchronize(target)
    return torch.equal(there.cpu(), torch.arange(COPIED, dtype=torch.int32))
