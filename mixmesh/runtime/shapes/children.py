"""Notices modules of the planned model that the script has replaced through its own object, as by
``net.head = other``. The program computes with the parameters of those that were planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_, methodcaller

from torch import nn

from ...errors import InputError
from ...frontend.trace.reads import is_metric

Table = Mapping[str, nn.Module | None]


@dataclass
class Children:
    """For each of a model's modules, its path, the table of the modules in it, and those that were planned;
    ``values`` are all that were there. Modules may be added or removed, and metrics, which no program holds,
    replaced."""

    tables: tuple[tuple[str, Table, dict[str, nn.Module | None]], ...]
    values: list[nn.Module | None]

    @classmethod
    def of(cls, model: nn.Module) -> Children:
        tables = tuple((path, m._modules, _planned(m._modules)) for path, m in model.named_modules())
        return cls(tables, list(_present(table for _, table, _ in tables)))

    def check(self) -> None:
        """Raises InputError if a module was replaced."""
        now = list(_present(table for _, table, _ in self.tables))
        if len(now) == len(self.values) and all(map(is_, now, self.values)):
            return
        for path, table, planned in self.tables:
            for name, module in planned.items():
                if name in table and table[name] is not module:
                    full = f"{path}.{name}".lstrip(".")
                    raise InputError(
                        f"{full} was replaced since the model was planned",
                        expected="the module that was planned",
                        got=f"another one ({type(table[name]).__name__})",
                        hint=(
                            "both modules from the start, and a number that chooses: if self.stage == 2 in "
                            "forward, model.stage = 2 in the loop",
                            "the values of the other one: model.load_full_state_dict(state)",
                            "plan again",
                        ),
                    )
        self.values = now


def _planned(table: Table) -> dict[str, nn.Module | None]:
    return {name: module for name, module in table.items() if module is None or not is_metric(module)}


def _present(tables: Iterable[Table]) -> Iterator[nn.Module | None]:
    return chain.from_iterable(map(methodcaller("values"), tables))
