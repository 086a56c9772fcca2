"""Peaks of memory, held against stored numbers: a change of how they are found changes none of them.

``--update-golden`` rewrites the numbers; read the difference before committing it.
"""

from __future__ import annotations

import json
from pathlib import Path

import step_programs

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.cost.gpu_memory import POOL_BYTES, allocator_loss
from mixmesh.lang.ir import Program
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.lang.plan_file import Plan, accumulation, schedule
from mixmesh.step.memory import PeakMemory

NUMBERS = Path(__file__).with_name("peaks.json")
DEVICE = {
    "cpu": 'name = "a", kind = "cpu", tflop_per_s = 1.0, memory_gib = 4, memory_gbyte_per_s = 100',
    "gpu": 'name = "a", kind = "gpu", tflop_per_s = 1.0, memory_gib = 4, memory_gbyte_per_s = 100',
}


def costs(kind: str, world_size: int) -> CostModel:
    machine = f"[[machine]]\nlink_gbit_per_s = 10\nlink_latency_us = 1\ndevices = [{{ {DEVICE[kind]} }}]\n"
    head = 'name = "equal"\n[network]\nbandwidth_gbit_per_s = 1\nlatency_us = 5\n'
    return CostModel(Cluster.parse(head + machine * world_size))


def peaks(held: Program | Plan, kind: str) -> list[int]:
    """Bytes of tensors on each rank, with what a CPU's heap loses."""
    samples = planned = None
    program = held
    if isinstance(held, Plan):
        program, samples = held.program, accumulation(held)
        planned = None if samples is None else schedule(program, held.micro_batches, samples)
    model = costs(kind, program.world_size)
    memory = PeakMemory(model, ADAM, samples)
    tensors = [a - b for a, b in zip(memory.peaks(program, planned), memory.constants(program))]
    if kind == "gpu":  # tests/test_gpu_memory.py has what the allocator loses
        tensors = [(size - POOL_BYTES) / (1 + allocator_loss({})) for size in tensors]
    return [round(size) for size in tensors]


def test_peaks_are_the_stored_ones(request):
    numbers = {
        name: {kind: peaks(held, kind) for kind in DEVICE}
        for name, held in ((name, step_programs.read(text)) for name, text in step_programs.every().items())
    }
    if request.config.getoption("--update-golden"):
        lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(numbers.items())]
        NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    assert numbers == json.loads(NUMBERS.read_text())
