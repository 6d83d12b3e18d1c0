# SPDX-License-Identifier: Apache-2.0
"""Print a row as it is trained on: `python -m nemo_automodel.components.datasets.show --target MODEL --data FILE`.

What the assistant says, and so what the draft learns, is coloured on a terminal and in ⟦brackets⟧ elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Sequence

import yaml
from rich.console import Console
from rich.text import Text

from nemo_automodel.components.datasets.bad_rows import BadRows
from nemo_automodel.components.datasets.encode import RowEncoder, check_tokenizer
from nemo_automodel.components.datasets.rows import BadRow, read_rows
from nemo_automodel.components.datasets.tokenizer import load_tokenizer
from nemo_automodel.errors import ConfigError, DataError, UserError

OPEN, CLOSE = "⟦", "⟧"
SUPERVISED = "bold black on green"


@dataclass(frozen=True)
class ShownToken:
    """One token of the row; `text`: the characters that it covers and those before it that no token covers."""

    id: int
    text: str
    supervised: bool


@dataclass(frozen=True)
class ShownRow:
    """One row as it is trained on."""

    name: str
    tokens: tuple[ShownToken, ...]
    cut_text: str  # what lies beyond the sequence length


def show_row(encoder: RowEncoder, data: str, number: int, *, split: str, column: str | None) -> ShownRow:
    """Encode row `number` (from 1) of a source.

    Raises:
        DataError: no such row, or it is no usable conversation.
    """
    check_tokenizer(encoder.tokenizer)
    rows = read_rows(data, where="--data", split=split, column=column)
    row = next(islice(rows, number - 1, None), None)
    if row is None:
        raise DataError(f"{data} has fewer than {number} rows", where="--row", remedy="give a smaller number")
    outcome = encoder.encode_or_fault(row)
    if isinstance(outcome, BadRow):
        bad = BadRows(None, "--data")
        bad.add(outcome.number, outcome.reason, outcome.remedy, outcome.place)
        raise DataError(bad.named[0], where="--data", remedy=outcome.remedy)
    text = encoder.spans_of(row)[0]
    offsets = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    tokens, done = [], 0
    for token, on, (_, end) in zip(outcome[0].input_ids.tolist(), outcome[0].loss_mask.tolist(), offsets):
        tokens.append(ShownToken(token, text[done : max(done, end)], on))
        done = max(done, end)
    return ShownRow(f"row {number}{f' ({row.place})' if row.place else ''}", tuple(tokens), text[done:])


def as_text(shown: ShownRow, *, colour: bool) -> Text:
    """The row's text with what is supervised marked."""
    text = Text()
    for on, group in groupby(shown.tokens, key=lambda token: token.supervised):
        part = "".join(token.text for token in group)
        text.append(part if colour or not on else f"{OPEN}{part}{CLOSE}", style=SUPERVISED if on and colour else "")
    if shown.cut_text:
        text.append(f"\n--- cut here: {len(shown.cut_text)} more characters lie beyond the sequence length ---")
    return text


def as_lines(shown: ShownRow) -> list[str]:
    """One line per token: position, id, whether it is supervised, text."""
    return [f"{i:6d} {t.id:8d} {'*' if t.supervised else ' '} {t.text!r}" for i, t in enumerate(shown.tokens)]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nemo_automodel.components.datasets.show", description=__doc__)
    parser.add_argument("--target", required=True, help="model folder or Hub id whose tokenizer and template are used")
    parser.add_argument("--data", required=True, help="as data.train")
    parser.add_argument("--row", type=int, default=1, help="number of the row, from 1")
    parser.add_argument("--split", default="train", help="as data.split")
    parser.add_argument("--column", help="as data.column")
    parser.add_argument("--seq-length", type=int, default=2048, help="as train.seq_length")
    parser.add_argument("--mask-reasoning-content", action="store_true", help="as data.mask_reasoning_content=true")
    parser.add_argument("--chat-template-kwargs", nargs="+", default=[], metavar="KEY=VALUE",
                        help="as data.chat_template_kwargs, e.g. enable_thinking=false")  # fmt: skip
    parser.add_argument("--ids", action="store_true", help="one line per token, with its id")
    parser.add_argument("--trust-remote-code", action="store_true", help="as target.trust_remote_code=true")
    arguments = parser.parse_args(argv)
    for name in ("row", "seq_length"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    return arguments


def parse_kwargs(words: Sequence[str]) -> dict[str, Any]:
    """`enable_thinking=false` -> {"enable_thinking": False}: values as YAML reads them, as in the configuration."""
    made = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is no KEY=VALUE", where="--chat-template-kwargs", remedy="write KEY=VALUE")
        made[key] = yaml.safe_load(value)
    return made


def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    try:
        tokenizer = load_tokenizer(arguments.target, where="--target", trust_remote_code=arguments.trust_remote_code)
        encoder = RowEncoder(
            tokenizer, arguments.seq_length, arguments.mask_reasoning_content,
            parse_kwargs(arguments.chat_template_kwargs),
        )  # fmt: skip
        shown = show_row(encoder, arguments.data, arguments.row, split=arguments.split, column=arguments.column)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    console = Console(highlight=False, soft_wrap=True)
    if arguments.ids:
        print("\n".join(as_lines(shown)))
    else:
        console.print(as_text(shown, colour=console.is_terminal), end="\n")
    supervised = sum(token.supervised for token in shown.tokens)
    print(f"{shown.name}: {len(shown.tokens)} tokens, {supervised} of them supervised", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
