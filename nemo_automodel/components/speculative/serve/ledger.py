# SPDX-License-Identifier: Apache-2.0
"""What planning collects: the config as it changes, each change with its reason, warnings, every problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from nemo_automodel.components.speculative.serve.types import Fixup
from nemo_automodel.errors import FixupError, UserError, VllmMissingError

WHERE = "serve.checkpoint"
DRAFT = "config.json of the draft"


@dataclass(frozen=True)
class Problem:
    """One reason why the draft cannot be served, and what to type next."""

    found: str
    where: str
    remedy: str
    needs_newer_vllm: bool = False


@dataclass(frozen=True)
class Caution:
    """Something that serves, but may not be what was trained; `remedy` is empty when there is nothing to type."""

    found: str
    where: str = DRAFT
    remedy: str = ""

    @property
    def text(self) -> str:
        return f"{self.found} ({self.remedy})" if self.remedy else self.found


@dataclass
class Ledger:
    """Mutable while planning, never seen outside it."""

    config: dict[str, Any]
    changes: list[Fixup] = field(default_factory=list)
    cautions: list[Caution] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def set(self, key: str, new: Any, why: str) -> None:
        """Write a config key, and note it unless it was so already."""
        old = self.config.get(key)
        if key in self.config and old == new and type(old) is type(new):
            return
        self.changes.append(Fixup(key, old, new, why))
        self.config[key] = new

    def drop(self, key: str, why: str) -> None:
        """Take a config key out, if it is there."""
        if key in self.config:
            self.changes.append(Fixup(key, self.config.pop(key), None, why))

    def warn(self, found: str, *, where: str = DRAFT, remedy: str = "") -> None:
        self.cautions.append(Caution(found, where, remedy))

    def problem(self, found: str, *, remedy: str, where: str = DRAFT, needs_newer_vllm: bool = False) -> None:
        self.problems.append(Problem(found, where, remedy, needs_newer_vllm))

    def number(self, key: str) -> int | None:
        """A positive integer of the config; None (and a problem, once) when it is missing or something else."""
        value = self.config.get(key)
        if type(value) is int and value > 0:
            return value
        if not any(problem.found.startswith(f"{key} is") for problem in self.problems):
            self.problem(f"{key} is {value!r}", remedy=f"set {key} to the draft's size")
        return None

    def raise_problems(self, place: str) -> None:
        """`raise_problems` of what was found so far."""
        raise_problems(self.problems, place)


def raise_problems(problems: Sequence[Problem], place: str) -> None:
    """One error for all problems.

    Raises:
        VllmMissingError: what is wrong includes that the chosen vLLM is too old for this draft.
        FixupError: anything else.
    """
    if not problems:
        return
    kind: type[UserError] = VllmMissingError if any(p.needs_newer_vllm for p in problems) else FixupError
    if len(problems) == 1:
        only = problems[0]
        raise kind(f"{place}: {only.found}", where=only.where, remedy=only.remedy)
    listed = "; ".join(f"({i}) {p.found} [{p.where}] -> {p.remedy}" for i, p in enumerate(problems, 1))
    raise kind(
        f"{len(problems)} problems with {place}: {listed}",
        where=WHERE,
        remedy="mend all of these, or name another",
    )


def as_mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one (configs carry nulls where a dict may stand)."""
    return value if isinstance(value, Mapping) else {}
