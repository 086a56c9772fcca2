"""Every error a user can meet, as one tree.

MixmeshError
├── InputError            the user's input is wrong (exit status 2)
│   ├── ClusterError      a cluster file
│   ├── JobError          a job file or what it returned
│   ├── PlanError         a plan file, or a plan that does not match model or cluster
│   └── ParseError        program text, with line, column and a caret
├── TraceError            the model cannot be exported (exit status 1)
├── UnsupportedOp         an operator has no rule for what was asked of it
├── Infeasible            no plan fits in memory
├── VerificationError     a program is not valid, or its results differ from the single device
├── CollectiveError       a collective failed or timed out: names the rank and the instruction
├── DeviceLost            a rank ended early: names it, its limit and its peak
└── TestbedUnavailable    the kernel or the user does not allow the emulated cluster

An error says what is wrong, what was expected and what was got, where, and what to try next.
"""

from __future__ import annotations

import os
import shlex


class MixmeshError(Exception):
    """An error with a place and a next step.

    ``message`` is one line. ``expected``/``got`` state the difference, ``where`` the user's own file and
    line (or key), ``hint`` what to type next (one line each), ``ranks`` the ranks at fault, where they are
    known. All but the message may be empty.
    """

    exit_status = 1

    def __init__(
        self,
        message: str,
        *,
        expected: str = "",
        got: str = "",
        where: str = "",
        hint: str | tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.expected = expected
        self.got = got
        self.where = where
        self.ranks = ranks
        self.hint = tuple(line for line in ((hint,) if isinstance(hint, str) else hint) if line)

    def __str__(self) -> str:
        lines = [self.message]
        lines += [f"  {label:<9}{text}" for label, text in self._fields() if text]
        return "\n".join(lines)

    def _fields(self) -> list[tuple[str, str]]:
        return [
            ("where", self.where),
            ("expected", self.expected),
            ("got", self.got),
            *(("try", line) for line in self.hint),
        ]

    def __reduce__(self):
        # exceptions with keyword-only arguments do not pickle by themselves; workers send theirs home
        state = dict(expected=self.expected, got=self.got, where=self.where, hint=self.hint, ranks=self.ranks)
        return (_rebuild, (type(self), self.message, state))


def unwritable(
    what: str, path: object, error: OSError, kind: type[MixmeshError] | None = None
) -> MixmeshError:
    """The error of a file that cannot be written; ``what`` names it: "the report"."""
    folder = os.path.dirname(str(path)) or "."
    return (kind or InputError)(
        f"cannot write {what}: {error.strerror}",
        expected="a file in a folder that is there and may be written to",
        where=str(path),
        hint="" if os.path.isdir(folder) else f"mkdir -p {shlex.quote(folder)}",
    )


def unreadable(
    what: str,
    path: object,
    error: Exception,
    kind: type[MixmeshError] | None = None,
    *,
    expected: str = "",
    hint: str | tuple[str, ...] = (),
) -> MixmeshError:
    """The error of a file that cannot be read; ``what`` names it: "the report"."""
    reason = getattr(error, "strerror", None) or str(error)
    return (kind or InputError)(
        f"cannot read {what}: {reason}", expected=expected, where=str(path), hint=hint
    )


def unmerged(
    what: str,
    where: str,
    mark: str,
    kind: type[MixmeshError] | None = None,
    *,
    expected: str,
    hint: str | tuple[str, ...],
) -> MixmeshError:
    """The error of a file with a conflict of git, which begins with the line ``mark``."""
    return (kind or InputError)(
        f"two versions of {what} were merged, and nobody has chosen between them",
        expected=expected,
        got=mark,
        where=where,
        hint=hint,
    )


def _rebuild(kind: type[MixmeshError], message: str, state: dict) -> MixmeshError:
    return kind(message, **state)


class InputError(MixmeshError):
    exit_status = 2


class ClusterError(InputError):
    pass


class JobError(InputError):
    pass


class PlanError(InputError):
    pass


class ParseError(InputError):
    pass


class TraceError(MixmeshError):
    pass


class UnsupportedOp(MixmeshError):
    pass


class Infeasible(MixmeshError):
    pass


class VerificationError(MixmeshError):
    pass


class CollectiveError(MixmeshError):
    pass


class DeviceLost(MixmeshError):
    pass


class TestbedUnavailable(MixmeshError):
    __test__ = False  # the name begins with "Test": keep pytest from collecting it
