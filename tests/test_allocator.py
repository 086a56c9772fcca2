"""The heap between steps: given back where that lasts, left alone where a process needs what it holds."""

from __future__ import annotations

import pytest

from mixmesh.base.heap import KEPT_BYTES, OWN_PIECE_BYTES, ROOMY, ROOMY_PIECE_BYTES
from mixmesh.runtime import allocator
from mixmesh.runtime.allocator import NEVER, SCARCE_PIECE_BYTES, HeapLimit
from mixmesh.step.memory import HEAP_BYTES

MIB = 2**20


@pytest.fixture
def heap(monkeypatch):
    """A process of ``held`` bytes, of which ``free`` are given back when asked for."""

    class Heap:
        held, free, times, peak, mapped, kept = 0, 0, 0, 0, OWN_PIECE_BYTES, KEPT_BYTES

        def give_back(self) -> None:
            self.times += 1
            self.held -= self.free

        def map_pieces_from(self, size_bytes: int) -> bool:
            self.mapped = size_bytes
            return True

        def set_limit(self, number: int, size_bytes: int) -> bool:
            assert number == allocator.M_TRIM_THRESHOLD
            self.kept = size_bytes
            return True

    made = Heap()
    monkeypatch.setattr(allocator, "grows", lambda: True)
    monkeypatch.setattr(allocator, "give_back", made.give_back)
    monkeypatch.setattr(allocator, "map_pieces_from", made.map_pieces_from)
    monkeypatch.setattr(allocator, "set_limit", made.set_limit)
    monkeypatch.setattr(allocator, "resident_bytes", lambda: made.held)
    monkeypatch.setattr(allocator, "peak_resident_bytes", lambda: made.peak)
    return made


def test_a_process_within_its_plan_is_left_alone(heap):
    limit = HeapLimit(1000)
    for heap.held in (900, 980, 950):
        limit.before_step()
    assert heap.times == 0 and heap.mapped == OWN_PIECE_BYTES
    HeapLimit(0).before_step()  # nothing was planned
    assert heap.times == 0


def test_the_end_of_the_heap_may_come_and_go_within_what_was_promised(heap):
    assert HeapLimit.of_plan(400 * 2**20).limit_bytes == 400 * 2**20 - KEPT_BYTES
    assert HeapLimit.of_plan(0).limit_bytes == 0  # nothing was promised
    assert HEAP_BYTES > KEPT_BYTES  # is part of every prediction


def test_a_heap_keeps_everything_where_a_device_has_room_to_spare(heap):
    assert grown(heap, 1000 * MIB, ROOMY * 1000 * MIB) == (NEVER, ROOMY_PIECE_BYTES)
    assert grown(heap, 0, 2000 * MIB) == (NEVER, ROOMY_PIECE_BYTES)  # nothing was promised
    assert grown(heap, 0, 0) == (KEPT_BYTES, OWN_PIECE_BYTES) and heap.times == 0
    kept, mapped = grown(heap, 1000 * MIB, 1.2 * 1000 * MIB)
    assert kept != NEVER and mapped <= OWN_PIECE_BYTES


def grown(heap, planned_bytes: float, usable_bytes: float) -> tuple[int, int]:
    """The limits of the heap after steps in which the process grows to 900 MiB."""
    heap.kept, heap.mapped = KEPT_BYTES, OWN_PIECE_BYTES
    limit = HeapLimit.of_plan(round(planned_bytes), usable_bytes)
    for heap.held in (300 * MIB, 800 * MIB, 900 * MIB):
        heap.peak = heap.held
        limit.before_step()
    return heap.kept, heap.mapped


@pytest.mark.parametrize("at_first, largest", [(300, 1020), (800, 1300), (1700, 2000)])
def test_a_heap_that_exceeds_what_was_planned_keeps_little_again(heap, at_first, largest):
    limit = HeapLimit.of_plan(1000 * MIB, 2000 * MIB)
    for held in (at_first, largest - 1, largest):
        heap.held = heap.peak = held * MIB
        limit.before_step()
    assert heap.kept == NEVER and heap.times == 0
    heap.held = heap.peak = (largest + 1) * MIB
    limit.before_step()
    assert heap.kept == KEPT_BYTES and heap.mapped != ROOMY_PIECE_BYTES and heap.times
    limit.before_step()
    assert heap.kept != NEVER


def test_a_heap_that_grows_is_given_back(heap):
    limit, heap.free = HeapLimit(1000), 400
    for held in (970, 990, 900, 990, 1020):  # fragments grow, and after a trim the steps hold less again
        heap.held = held
        limit.before_step()
    assert heap.times == 2 and limit.limit_bytes == 1000 and heap.mapped == SCARCE_PIECE_BYTES


def test_a_heap_keeps_what_the_plan_has_room_for(heap):
    """Once the first steps have shown how much the process holds, and no more than that leaves."""
    limit = HeapLimit(1000)
    steps = ((300, 300, 0), (700, 700, 0), (700, 700, 300), (720, 800, 200), (700, 800, 200), (900, 1100, 0))
    for heap.held, heap.peak, room in steps:
        limit.before_step()
        assert heap.kept == KEPT_BYTES + room
    assert heap.times == 1


def test_what_a_step_leaves_free_serves_larger_pieces(heap):
    with pytest.raises(RuntimeError), allocator.heap_with_free(KEPT_BYTES):
        assert heap.mapped == KEPT_BYTES
        raise RuntimeError
    assert heap.mapped == OWN_PIECE_BYTES
    with allocator.heap_with_free(OWN_PIECE_BYTES // 2):
        assert heap.mapped == OWN_PIECE_BYTES


def test_what_came_and_went_within_a_step_counts(heap):
    limit, heap.free, heap.peak, heap.held = HeapLimit(1000), 100, 990, 800
    limit.before_step()
    assert heap.times == 0  # before the first step
    heap.peak = 995
    limit.before_step()
    assert heap.times == 1 and heap.mapped == SCARCE_PIECE_BYTES
    for heap.peak in (995, 999):
        limit.before_step()
    assert heap.times == 1 and limit.limit_bytes == 1000


def test_a_heap_that_would_exceed_the_plan_with_another_step_like_the_last_is_given_back(heap):
    limit, heap.free = HeapLimit(1000), 100
    for heap.held, heap.peak in ((300, 300), (850, 850), (880, 880), (940, 940)):
        assert heap.times == 0  # 880 and 30 more are within the plan, and the first step is like no other
        limit.before_step()
    assert heap.times == 0
    heap.held = heap.peak = 980
    limit.before_step()
    assert heap.times == 1 and heap.mapped == SCARCE_PIECE_BYTES and limit.limit_bytes == 1000


def test_what_a_process_needs_is_not_given_back_at_every_step(heap):
    limit, heap.free = HeapLimit(1000), 600
    for _ in range(50):
        heap.held = 2000  # a data set beside the model, and activations that come with every step
        limit.before_step()
    assert heap.times == 1 and heap.mapped == OWN_PIECE_BYTES
    heap.held = 2300  # more than a tenth above that
    limit.before_step()
    assert heap.times == 2
