"""mixmesh explain"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cluster import Cluster, presets
from ..errors import InputError
from ..lang.check import check_loaded, check_plan
from ..lang.ir import Instruction, print_instruction
from ..lang.plan_file import Plan
from .output import Json, print_json, seconds, size, table, working
from .plan import ProfileFile
from .show import PlanFile

if TYPE_CHECKING:
    from ..explain import Alternative, Explanation, Overview, Unit

SHOWN = 12  # limit on the instructions listed that use a tensor


def explain(
    plan: PlanFile,
    tensor: Annotated[
        str | None,
        typer.Option("--tensor", metavar="NAME", help="A value (%h), a parameter's path, or the end of one."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="C.toml", help="The cluster that the plan was made for."),
    ] = None,
    profile: ProfileFile = None,
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="Ask about the tensor's counterparts in all layers together.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Why a tensor is placed as it is: every other placement with the cheapest program that uses it. Without
    --tensor who computes what, and what passes between them."""
    from ..api import load_profile
    from ..explain import explain_plan, explain_tensor

    if all_layers and tensor is None:
        raise InputError(
            "--all-layers is about one tensor and its counterparts",
            expected="--tensor NAME",
            got="no --tensor",
            hint=f"mixmesh explain {plan} --tensor layers.0.weight --all-layers",
        )
    loaded = Plan.load(plan)
    described = cluster_of(loaded, plan, cluster, f"explain {plan}{f' --tensor {tensor}' if tensor else ''}")
    check_loaded(loaded, str(plan))
    if tensor is None:
        seen = explain_plan(loaded, described, profile=load_profile(profile))
        if as_json:
            print_json(overview_object(loaded, seen))
        else:
            print(overview_text(loaded, seen))
        return
    with working("searching with other placements"):
        explanation = explain_tensor(
            loaded, described, tensor, profile=load_profile(profile), all_layers=all_layers
        )
    lines = loaded.text.split("\n")
    if as_json:
        print_json(explanation_object(explanation, lines))
    else:
        print(explanation_text(explanation, lines))


def cluster_of(plan: Plan, path: Path, cluster: Path | None, command: str) -> Cluster:
    """The cluster of a file, or else the preset for which the plan was made. Raises InputError if there is
    neither, PlanError if the plan was made for another cluster; ``command`` is what was typed."""
    if cluster is not None:
        described = Cluster.load(cluster)
        check_plan(plan, described, where=str(path))
        return described
    for preset in map(Cluster.load, presets()):
        if preset.fingerprint == plan.cluster_fingerprint:
            return preset
    raise InputError(
        "costs need the cluster, and a plan holds only its name",
        expected=f'--cluster with the file of "{plan.cluster_name}" ({plan.cluster_fingerprint})',
        got="no --cluster",
        where=str(path),
        hint=f"mixmesh {command} --cluster C.toml",
    )


def overview_text(plan: Plan, seen: Overview) -> str:
    out = [
        f"{plan.program.name} on {plan.cluster_name or 'a cluster'}, planned by {plan.planner}: "
        f"a step of {seconds(seen.step_s)}",
        *seen.sentences,
        "",
        table(("", "ranks", "samples", "operators", "parameters stored", "bytes", "first and last"),
              [_unit_row(u) for u in seen.units]),
        "",
    ]  # fmt: skip
    computes = ", ".join(seconds(s) for s in seen.compute_s)
    out.append(f"by rank, computing takes {computes}")
    if seen.exchanged:
        out.append("between ranks:")
        out += [f"  {text}" for text, _ in seen.exchanged]
    else:
        out.append("nothing passes between ranks but the loss")
    return "\n".join(out)


def _unit_row(u: Unit) -> tuple[str, ...]:
    return (
        u.name,
        " ".join(map(str, u.ranks)),
        " ".join(map(str, u.samples)),
        str(u.num_operators),
        ", ".join(f"{count} {text}" for text, count in u.placements.items()),
        size(u.parameter_bytes),
        ", ".join(u.params),
    )


def overview_object(plan: Plan, seen: Overview) -> dict[str, Any]:
    return {
        "planner": plan.planner,
        "kind": seen.kind,
        "predicted_step_s": seen.step_s,
        "compute_s": list(seen.compute_s),
        "units": [vars(u) for u in seen.units],
        "exchanged": [{"text": text, "time_s": time_s} for text, time_s in seen.exchanged],
        "summary": " ".join(seen.sentences),
    }


def explanation_text(answer: Explanation, lines: list[str]) -> str:
    name = answer.tensors[0]
    place = location(answer, lines)
    out = [f"%{name}, {answer.op}, is {answer.placement} in the plan" + (f" ({place})" if place else "")]
    if len(answer.tensors) > 1:
        out.append(f"with the {len(answer.tensors) - 1} in its place in other layers")
    shown = [answer.maker, *answer.used]
    out += ["", *(f"  {_line(i, lines)}" for i in shown[:SHOWN])]
    if len(shown) > SHOWN:
        out.append(f"  ... and {len(shown) - SHOWN} more")
    out += ["", table(HEADER, [_row(a) for a in answer.alternatives]), ""]
    for a in answer.alternatives:
        out += _details(a)
    out += [f"note: {text}" for text in answer.notes]
    return "\n".join([*out, answer.summary])


HEADER = ("", "placement", "step", "against the plan", "instructions differ", "memory per rank", "fits")


def _row(a: Alternative) -> tuple[str, ...]:
    mark = "*" if a.is_plan else ""
    if a.program is None:
        return (mark, a.placement, "-", "-", "-", "-", "impossible")
    return (
        mark,
        a.placement,
        seconds(a.step_s),
        signed(a.difference_s, seconds),
        str(a.num_differing),
        spread(a.memory_difference_bytes),
        "yes" if a.fits else "no",
    )


def signed(value: float, text: Callable[[float], str]) -> str:
    if value == 0:
        return "0"
    return ("+" if value > 0 else "-") + text(abs(value))


def spread(differences: tuple[int, ...]) -> str:
    """The smallest and the largest difference, or one of them if both print alike."""
    ends = (signed(f(differences), size) for f in (min, max))
    return " to ".join(dict.fromkeys(ends))


def _details(a: Alternative) -> list[str]:
    from ..explain.summary import kinds

    if a.program is None:
        return [f"{a.placement}: impossible, {a.impossible}"]
    out = []
    for sign, changed in (("adds", a.added), ("saves", a.removed)):
        out += [f"{a.placement}: {sign} {text}" for text, _ in kinds(changed)]
    return out


def _line(i: Instruction, lines: list[str]) -> str:
    """Formats an instruction as it stands in the file, its comments included."""
    text = lines[i.line - 1].strip() if 0 < i.line <= len(lines) else print_instruction(i)
    return re.sub(r"\s+#", "  #", text)


def location(answer: Explanation, lines: list[str]) -> str:
    """The user's line of a tensor, or of the first operator that uses it, from the comments of the plan."""
    for i in (answer.maker, *answer.used):
        text = i.location or _line(i, lines).partition("#")[2]
        if match := re.search(r"(\S+:\d+)\s*$", text):
            return match[1]
    return ""


def explanation_object(answer: Explanation, lines: list[str]) -> dict[str, Any]:
    return {
        "tensor": answer.tensors[0],
        "tensors": list(answer.tensors),
        "op": answer.op,
        "location": location(answer, lines),
        "placement": answer.placement,
        "instructions": list(answer.lines),
        "predicted_step_s": answer.step_s,
        "alternatives": [_object(a) for a in answer.alternatives],
        "can_be_improved": answer.can_be_improved,
        "summary": answer.summary,
        "notes": list(answer.notes),
    }


def _object(a: Alternative) -> dict[str, Any]:
    return {
        "placement": a.placement,
        "is_plan": a.is_plan,
        "possible": a.program is not None,
        "impossible": a.impossible,
        "predicted_step_s": a.step_s,
        "difference_s": a.difference_s,
        "feasible": a.fits,
        "num_differing_instructions": a.num_differing,
        "added": [vars(c) for c in a.added],
        "removed": [vars(c) for c in a.removed],
        "memory_difference_bytes": list(a.memory_difference_bytes),
    }
