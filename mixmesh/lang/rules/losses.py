"""Rules of normalisations, losses and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable

from . import shapes as s
from .pattern import PatternMismatch
from .rule import Arguments, Call, LocalCall

NONE, MEAN, SUM = 0, 1, 2  # ATen's numbers for ``reduction``


def normalized(call: Call) -> str:
    """The rule of layer_norm(x, shape, weight, bias): the normalized dims cannot be cut. Some variants also
    return statistics."""
    count = len(call.args[1])
    tail = " ".join(f"n{i}!" for i in range(count))
    statistics = "".join([f", ... {' '.join(['1'] * count)}"] * (len(call.outputs) - 1))
    return f"... {tail}, {tail}, {tail} -> ... {tail}{statistics}"


def group_norm(call: Call) -> tuple[str, dict[str, int]]:
    """group_norm(x, num_groups, weight, bias): samples and whole groups are free."""
    groups = call.args[1]
    rest = " ".join(f"h{i}!" for i in range(s.rank_of(call) - 2))
    return f"n (g c!) {rest}, (g c!), (g c!) -> n (g c!) {rest}", {"g": groups}


def local_group_norm(local: LocalCall) -> Arguments:
    args = local.call.args
    held = args[1] * local.in_shapes[0][1] // local.call.inputs[0].shape[1]
    return (args[0], held, *args[2:]), local.call.kwargs


def native_group_norm(call: Call) -> tuple[str, dict[str, int]]:
    """native_group_norm(x, weight, bias, N, C, HxW, group, eps) -> y, mean, rstd."""
    rest = " ".join(f"h{i}!" for i in range(s.rank_of(call) - 2))
    return f"n (g c!) {rest}, (g c!), (g c!) -> n (g c!) {rest}, n g, n g", {"g": call.args[6]}


def local_native_group_norm(local: LocalCall) -> Arguments:
    args, (samples, channels) = local.call.args, local.in_shapes[0][:2]
    held = args[6] * channels // args[4]
    return (*args[:3], samples, channels, args[5], held, *args[7:]), local.call.kwargs


def batch_norm(*, training: int | None) -> Callable[[Call], str]:
    """batch_norm(x, weight, bias, mean, var, ...): channels are free; with fixed statistics samples are too.

    ``training`` is the position of the flag, None for an operator whose statistics are always fixed.
    """

    def rule(call: Call) -> str:
        fixed = training is None or not call.arg(training)
        mark = "" if fixed else "!"
        rank = s.rank_of(call)
        x = " ".join([f"n{mark}", "c", *(f"h{i}{mark}" for i in range(rank - 2))])
        outputs = [x]
        for n, t in enumerate(call.outputs[1:]):
            outputs.append(f"z{n}!" if t.shape == (0,) else "c")
        return ", ".join([x, *["c"] * (len(call.inputs) - 1)]) + " -> " + ", ".join(outputs)

    return rule


def _of_channels(call: Call) -> str:
    """The dims of data [N, C, ...]."""
    return " ".join(["n", "c", *(f"h{i}" for i in range(s.rank_of(call) - 2))])


def local_batch_norm(call: Call) -> str:
    """local_batch_norm(x, weight, bias, mean, var, ...): each rank normalises its own samples."""
    rest = " ".join(f"h{i}!" for i in range(s.rank_of(call) - 2))
    kept = "c" if call.outputs[1].shape != (0,) else "z!"
    return f"n c {rest}{', c' * (len(call.inputs) - 1)} -> n c {rest}, {kept}, {kept}"


def moments(call: Call) -> str:
    """moments(x): sums of x and of x^2 over all dims but the channels."""
    return f"{_of_channels(call)} -> s! c"


def normalise(call: Call) -> str:
    """normalise(x, moments, weight, bias, count, eps): elementwise, with the moments whole."""
    x = _of_channels(call)
    return f"{x}, s! c, c, c -> {x}"


def instance_norm(call: Call) -> str:
    """instance_norm(x, weight, bias, mean, var, use_input_stats): samples and channels are free; in
    evaluation by running statistics all dims are, in training with them only channels."""
    is_fixed = call.args[5] is False
    samples = "n" if is_fixed or call.args[3] is None else "n!"  # statistics are means over samples
    rest = " ".join(f"h{i}" if is_fixed else f"h{i}!" for i in range(s.rank_of(call) - 2))
    affine = ", c" * (len(call.inputs) - 1)
    return f"{samples} c {rest}{affine} -> {samples} c {rest}"


def weight_norm(call: Call) -> str:
    """_weight_norm(v, g, dim): a norm over all dims but one."""
    rank = s.rank_of(call)
    dim = call.arg(2, "dim", 0)
    v = " ".join("c" if i == dim else f"x{i}!" for i in range(rank))
    g = " ".join("c" if i == dim else "1" for i in range(rank))
    return f"{v}, {g} -> {v}" if len(call.outputs) == 1 else f"{v}, {g} -> {v}, {g}"


def elementwise_loss(index: int) -> Callable[[Call], str]:
    """A loss of inputs of equal shapes whose ``reduction`` is argument ``index``.

    The local kernel scales the mean of a shard by the rank's share. PyTorch's gradient of a mean divides by
    the elements of the first input, so a loss that broadcasts it is not cut.
    """

    def rule(call: Call) -> str:
        reduction = call.arg(index, "reduction", MEAN)
        if reduction == MEAN and call.inputs[0].shape != call.inputs[1].shape:
            raise PatternMismatch("a mean loss of inputs of unequal shapes")
        out = "..." if reduction == NONE else ""
        return ", ".join(["..."] * len(call.inputs)) + f" -> {out}"

    return rule


def row_loss(index: int) -> Callable[[Call], str]:
    """A loss of whole rows, each with one target or a row of them, whose ``reduction`` is argument ``index``.

    A mean is not cut: tracing replaces it by the mean of the rows' losses.
    """

    def rule(call: Call) -> str:
        reduction = call.arg(index, "reduction", MEAN)
        rank = s.rank_of(call)
        rows = [f"n{i}!" if reduction == MEAN else f"n{i}" for i in range(rank - 1)]
        terms = [" ".join([*rows, "c!"] if len(t.shape) == rank else rows) for t in call.inputs]
        if call.op == "aten.multi_margin_loss" and len(call.inputs) > 2:
            terms[2] = "c!"  # class weights
        return ", ".join(terms) + " -> " + (" ".join(rows) if reduction == NONE else "")

    return rule


def cross_entropy(call: Call) -> str:
    """cross_entropy_loss, nll_loss(x, target, weight, reduction): classes are whole, samples free.

    A mean divides by the number of all targets, so it is not cut: tracing replaces it by a sum divided by a
    number that is summed over all ranks.
    """
    reduction = call.arg(3, "reduction", MEAN)
    mark = "!" if reduction == MEAN else ""
    spatial = [f"x{i}{mark}" for i in range(s.rank_of(call) - 2)]
    samples = ([f"n{mark}"] if s.rank_of(call) > 1 else []) + spatial
    logits = [*samples[:1], "c!", *spatial] if s.rank_of(call) > 1 else ["c!"]
    out = " ".join(samples) if reduction == NONE else ""
    # the target may also be probabilities
    target = logits if call.inputs[1].shape == call.inputs[0].shape else samples
    return f"{' '.join(logits)}, {' '.join(target)}, c! -> {out}"


def _rows(call: Call) -> str:
    """The dims of logits [N, C, ...] other than that of the classes."""
    return " ".join(["n", *(f"x{i}" for i in range(s.rank_of(call) - 2))])


def sum_exp(call: Call) -> str:
    """sum_exp(x): a sum over classes."""
    rows = _rows(call)
    return f"{rows.replace('n', 'n c', 1)} -> {rows}"


def cross_entropy_by_sums(call: Call) -> str:
    """cross_entropy(x, sums, target, reduction): classes are free, as ``sums`` cover all of them."""
    rows = _rows(call)
    out = rows if call.arg(3) == NONE else ""
    return f"{rows.replace('n', 'n c', 1)}, {rows}, {rows} -> {out}"


def nll_loss_forward(call: Call) -> str:
    """Like ``nll_loss``, with the sum of the weights as a second result; only a sum may be cut."""
    text = cross_entropy(call)
    if call.arg(3, "reduction", MEAN) != SUM:
        whole = " ".join(f"d{i}!" for i in range(s.rank_of(call)))
        target = " ".join(f"t{i}!" for i in range(s.rank_of(call, 1)))
        out = " ".join(f"t{i}!" for i in range(len(call.outputs[0].shape)))
        return f"{whole}, {target}, c! -> {out}, "
    return f"{text}, "


def ctc_loss(call: Call) -> str:
    """ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction)."""
    reduction = call.arg(5, "reduction", MEAN)
    n = "n!" if reduction == MEAN else "n"
    targets = f"{n} s!" if s.rank_of(call, 1) == 2 else "s!"
    if targets == "s!":
        n = "n!"
    return f"t! {n} c!, {targets}, {n}, {n} -> " + (n if reduction == NONE else "")


def cosine_similarity(call: Call) -> str:
    rank = len(call.outputs[0].shape) + 1
    dim = s.wrap(call.arg(2, "dim", 1), rank)
    full = [f"d{i}!" if i == dim else f"d{i}" for i in range(rank)]
    terms = [" ".join(full[rank - len(t.shape) :]) for t in call.inputs]
    return ", ".join(terms) + " -> " + " ".join(f"d{i}" for i in range(rank) if i != dim)


def pairwise_distance(call: Call) -> str:
    """pairwise_distance(a, b, p, eps, keepdim): a norm over the last dim, which is a sum for p = 1."""
    out = "... 1" if call.arg(4, "keepdim", False) else "..."
    term = "... d" if call.arg(2, "p", 2) == 1 else "... d!"
    return f"{term}, {term} -> {out}"


def recurrent_flops(call: Call) -> str:
    """The size of a product with every matrix for each step and sample."""
    matrices = [k for k, t in enumerate(call.inputs[1:]) if len(t.shape) == 2]
    return " + ".join(f"t n p{k}_0 p{k}_1" for k in matrices)


def recurrent_cell(states: int) -> Callable[[Call], str]:
    """The rule of lstm_cell, gru_cell, rnn_tanh_cell(input, state, weights, biases): only the batch can be
    cut."""

    def rule(call: Call) -> str:
        hidden = [f"n h{i}!" for i in range(states)]
        weights = call.inputs[1 + states :]
        terms = [" ".join(["g!", f"w{k}!"][: len(t.shape)]) for k, t in enumerate(weights)]
        outs = [f"n h{i}!" for i in range(len(call.outputs))]
        return ", ".join(["n i!", *hidden, *terms]) + " -> " + ", ".join(outs)

    return rule


def recurrent(states: int) -> Callable[[Call], str]:
    """lstm, gru, rnn(input, state, params, ..., batch_first): only the batch is free."""

    def rule(call: Call) -> str:
        batch_first = call.args[8]
        if call.args[6] and call.args[5]:  # training with dropout between the layers
            x, n = "t! n! i!", "n!"
        else:
            x, n = ("n t! i!" if batch_first else "t! n i!"), "n"
        if n == "n!" and batch_first:
            x = "n! t! i!"
        hidden = [f"l! {n} h{i}!" for i in range(states)]
        params = call.inputs[1 + states :]
        terms = [" ".join(f"p{k}_{i}!" for i in range(len(t.shape))) for k, t in enumerate(params)]
        return ", ".join([x, *hidden, *terms]) + " -> " + ", ".join([x.replace("i!", "o!"), *hidden])

    return rule
