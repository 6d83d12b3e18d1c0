# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks: conversations out of one or several files, each with the subset it is reported under."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from nemo_automodel.components.datasets.bad_rows import BadRows
from nemo_automodel.components.datasets.rows import COLUMNS, ChatRow, normalise_row, read_records
from nemo_automodel.errors import DataError

WHERE = "serve.benchmark.prompts"
SUBSET_FIELDS = ("subset", "category", "task")
REMEDY = f"give rows with one of: {', '.join(COLUMNS)}, turns, question, prompt"


@dataclass(frozen=True)
class Prompt:
    """One conversation: what is asked first, then user turns that follow the server's own answers."""

    row: ChatRow
    followups: tuple[str, ...] = ()
    subset: str = ""  # "": the workload has none

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        return self.row.messages


@dataclass(frozen=True)
class PromptFile:
    """A file, folder or Hub id; `name` is given by the user, or the file's own when there are several."""

    path: str
    name: str = ""


def prompt_files(prompts: str | Sequence[str]) -> tuple[PromptFile, ...]:
    """`a.jsonl`, or several of them, each plain or `name=path`."""
    entries = [prompts] if isinstance(prompts, str) else list(prompts)
    files = []
    for entry in entries:
        name, equals, path = entry.partition("=")
        named = bool(equals) and "/" not in name and not Path(entry).exists()
        own = Path(entry).stem if len(entries) > 1 else ""
        files.append(PromptFile(path, name) if named else PromptFile(entry, own))
    return tuple(files)


def load_prompts(
    prompts: str | Sequence[str], num_prompts: int, *, split: str = "train", column: str | None = None
) -> tuple[Prompt, ...]:
    """The first conversations of the files, the same number of each subset as far as there are so many.

    A row is a chat (`messages`, `conversations`, or `column`; the trailing answer is left out), a question of several
    `turns` (MT-Bench, Spec-Bench), a `question`, or a `prompt` (text or a chat). The subset is the file's name, else
    the row's own `subset`, `category` or `task`. `split` as in `read_rows`.

    Raises:
        DataError: nothing readable there, a row has no question, or no row has anything to ask.
    """
    subsets: dict[str, list[Prompt]] = {}
    for file in prompt_files(prompts):
        for prompt in _read(file, num_prompts, split, column):
            subsets.setdefault(prompt.subset, []).append(prompt)
    if not subsets:
        raise DataError(f"{prompts} holds nothing to ask", where=WHERE, remedy="name chat rows that have a user turn")
    return tuple(_spread(list(subsets.values()), num_prompts))


def digest_prompts(prompts: Sequence[Prompt]) -> str:
    """Hex SHA-256 of everything that is asked, in order."""
    asked = [[list(p.row.messages), list(p.row.tools), list(p.followups), p.subset] for p in prompts]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _read(file: PromptFile, limit: int, split: str, column: str | None) -> Iterator[Prompt]:
    """Up to `limit` conversations of each subset; a file without subsets is read no further than needed."""
    counts: dict[str, int] = {}
    bad, read = BadRows(None, WHERE), 0
    for number, raw in enumerate(read_records(file.path, where=WHERE, split=split), start=1):
        read += 1
        try:
            prompt = parse_prompt(raw, number, column)
        except ValueError as error:
            bad.add(number, str(error), REMEDY)
            bad.refuse_early(read)
            continue
        if prompt is None:
            continue
        prompt = replace(prompt, subset=file.name or prompt.subset)
        counts[prompt.subset] = counts.get(prompt.subset, 0) + 1
        if counts[prompt.subset] <= limit:
            yield prompt
        if set(counts) <= {"", file.name} and sum(counts.values()) >= limit:
            break
    bad.refuse_too_many(read)


def parse_prompt(raw: Any, number: int, column: str | None = None) -> Prompt | None:
    """One record -> `Prompt`; None when it ends before anybody asks.

    Raises:
        ValueError: what is wrong with the record, in one clause.
    """
    fields = raw if isinstance(raw, Mapping) else {}
    subset = next((str(fields[name]) for name in SUBSET_FIELDS if fields.get(name) is not None), "")
    chat = column or next((name for name in COLUMNS if fields.get(name) is not None), None)
    form = next((name for name in ("turns", "question", "prompt") if fields.get(name)), None)
    if chat or form is None:
        row = normalise_row(raw, number, chat)
        messages = _cut_answer(row.messages)
        return Prompt(replace(row, messages=messages), subset=subset) if messages else None
    if form == "prompt" and not isinstance(fields["prompt"], str):
        return parse_prompt({"messages": fields["prompt"], "subset": subset, "tools": fields.get("tools")}, number)
    turns = fields[form] if form == "turns" else [fields[form]]
    if not isinstance(turns, (list, tuple)) or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{form!r} must be text" if form != "turns" else "'turns' must be a list of texts")
    return Prompt(ChatRow(number, ({"role": "user", "content": turns[0]},)), tuple(turns[1:]), subset)


def _cut_answer(messages: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return messages


def _spread(subsets: list[list[Prompt]], total: int) -> list[Prompt]:
    """`total` prompts, one of each subset in turn while it lasts; kept together by subset."""
    shares = [0] * len(subsets)
    while sum(shares) < total and any(share < len(s) for share, s in zip(shares, subsets, strict=True)):
        for index, subset in enumerate(subsets):
            if shares[index] < len(subset) and sum(shares) < total:
                shares[index] += 1
    return [prompt for share, subset in zip(shares, subsets, strict=True) for prompt in subset[:share]]
