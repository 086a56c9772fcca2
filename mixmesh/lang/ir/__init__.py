"""The values that programs consist of: placements, types, the logical graph, the program and its text."""

from .body import Body, Buckets
from .copies import Cell, cell_bytes, cells, piece
from .graph import (
    LEAVES,
    NOT_DIFFERENTIABLE,
    SINKS,
    Arg,
    DType,
    Graph,
    Node,
    Ref,
    has_gradient,
    map_arguments,
    map_refs,
    nameless,
    refs,
    users_of,
    with_inputs,
    with_names,
)
from .instruction import REDISTRIBUTIONS, Instruction, redistribution, with_attrs
from .levels import Levels, Parts, leaders
from .local_norms import (
    BATCH_NORMS,
    LOCAL_NORM,
    batch_norm_of,
    local_norms,
    lonely_norms,
    own_samples,
)
from .outputs import (
    Returned,
    batch_size_of,
    dealt_rows,
    has_rows,
    held_rows,
    outputs_of,
    shown_rows,
    with_rows_as_dealt,
)
from .ownership import owned_type, stage_of
from .placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Ratio,
    Replicate,
    Scope,
    Shard,
    dual,
    even_ratio,
    is_even,
    make_ratio,
    ratio_of_speeds,
    shard_offsets,
    shard_sizes,
    support,
)
from .printing import print_instruction
from .program import Program, print_program, without_needless_names
from .recompute import region_of, regions, release_points, with_regions
from .samples import Samples, local_kind, micro_step_program, once_program, samples_of
from .slices import with_whole_rows
from .stages import in_flight, passes_of, stages_of, transfers_of
from .text import parse_program
from .types import (
    DTYPE_BYTES,
    EVERYWHERE,
    Cut,
    TensorType,
    ValueType,
    local_bytes,
    local_shape,
    participants,
    rank_sizes,
)
from .wgrad import (
    NEVER,
    WGRADS,
    Beside,
    beside_points,
    last_points,
    returned,
    separable,
    weight_points,
    wgrad_of,
    with_wgrads,
)

__all__ = [
    "BATCH_NORMS", "DTYPE_BYTES", "EVERYWHERE", "LEAVES", "LOCAL_NORM", "NEVER", "NOT_DIFFERENTIABLE",
    "PARTIAL", "REDISTRIBUTIONS", "REPLICATE", "SINKS", "WGRADS", "Arg", "Beside", "Body", "Buckets",
    "Cell", "Cut", "DType", "Graph", "Instruction", "Levels", "Node", "Partial", "Parts", "Placement",
    "Program", "Ratio", "Ref", "Replicate", "Returned", "Samples", "Scope", "Shard", "TensorType",
    "ValueType", "batch_norm_of", "batch_size_of", "beside_points", "cell_bytes", "cells", "dealt_rows",
    "dual", "even_ratio", "has_gradient", "has_rows", "held_rows", "in_flight", "is_even", "last_points",
    "leaders", "local_bytes", "local_kind", "local_norms", "local_shape", "lonely_norms", "make_ratio",
    "map_arguments", "map_refs", "micro_step_program", "nameless", "once_program", "outputs_of",
    "own_samples", "owned_type", "parse_program", "participants", "passes_of", "piece", "print_instruction",
    "print_program", "rank_sizes", "ratio_of_speeds", "redistribution", "refs", "region_of", "regions",
    "release_points", "returned", "samples_of", "separable", "shard_offsets", "shard_sizes", "shown_rows",
    "stage_of", "stages_of", "support", "transfers_of", "users_of", "weight_points", "wgrad_of", "with_attrs",
    "with_inputs", "with_names", "with_regions", "with_rows_as_dealt", "with_wgrads", "with_whole_rows",
    "without_needless_names",
]  # fmt: skip
