# SPDX-License-Identifier: Apache-2.0
"""The model card of a published draft: what it is for, how it came about, what was measured under which conditions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from nemo_automodel.files import is_path_like

_STEP = re.compile(r"epoch_(\d+)_step_(\d+)$")


@dataclass(frozen=True)
class Card:
    """All that the card says; `trained` and `result`: the run's train_job.json and result.json, where there are any."""

    name: str
    target: str
    parallel: bool
    k: int
    speculators: bool
    trained: Mapping[str, Any] | None
    checkpoint: Path
    result: Mapping[str, Any] | None


def render_card(card: Card) -> str:
    """README.md with the Hub's front matter."""
    parts = [_front(card), _intro(card), _serve(card), _training(card), _numbers(card)]
    return "\n".join(part for part in parts if part)


def _front(card: Card) -> str:
    lines = ["---", "library_name: vllm", "tags:", "- speculative-decoding"]
    lines += ["- p-eagle" if card.parallel else "- eagle3"]
    if not is_path_like(card.target):
        lines += [f"base_model: {json.dumps(card.target)}"]
    return "\n".join([*lines, "---", ""])


def _intro(card: Card) -> str:
    kind = "P-EAGLE (arXiv 2602.01469)" if card.parallel else "EAGLE-3 (arXiv 2503.01840)"
    return (
        f"# {card.name}\n\nA {kind} draft for speculative decoding. It proposes {card.k} tokens at a time for\n"
        f"`{card.target}` and is of use with that model only. The target's answers stay its own: what it does not\n"
        "confirm is thrown away.\n"
    )


def _serve(card: Card) -> str:
    if card.speculators:
        command = f"vllm serve {card.name}"
    else:
        speculative = {"method": "eagle3", "model": card.name, "num_speculative_tokens": card.k}
        speculative |= {"parallel_drafting": True} if card.parallel else {}
        command = f"vllm serve {card.target} --speculative-config '{json.dumps(speculative)}'"
    needs = "0.16" if card.parallel else "0.14"
    return f"## Serve it\n\nvLLM {needs} or newer:\n\n```\n{command}\n```\n"


def _training(card: Card) -> str:
    found = [match for part in card.checkpoint.parts if (match := _STEP.match(part))]
    lines = [f"- checkpoint: epoch {found[-1].group(1)}, step {found[-1].group(2)}"] if found else []
    if card.trained is None:
        lines.append("- data and settings: not recorded with the checkpoint")
    else:
        data, train, draft = (card.trained[name] for name in ("data", "train", "draft"))
        depth = draft.get("num_depths" if card.parallel else "ttt_steps")
        rows = f", the first {data['max_rows']} rows" if data.get("max_rows") else ""
        batch = train["micro_batch_size"] * train["grad_accumulation_steps"]
        lines += [
            f"- data: {_public(data['train'])}{rows}",
            f"- rows of at most {train['seq_length']} tokens, {batch} rows a step, learning rate {train['lr']:g}, "
            f"seed {train['seed']}",
            f"- draft: {draft['num_layers']} layers, trained depth {depth}",
        ]
    return "## Training\n\n" + "\n".join(lines) + "\n"


def _public(path: str) -> str:
    """A Hub id as it is; of a local path the name only."""
    return path if not is_path_like(path) else Path(path).name


def _numbers(card: Card) -> str:
    if card.result is None:
        return "## Measured\n\nNothing yet.\n"
    bench, versions = card.result["benchmark"], card.result.get("versions") or {}
    per_position = " ".join(f"{share:.3f}" for share in bench["acceptance_per_position"])
    rows = [
        (
            "acceptance length",
            f"{bench['acceptance_length']:.3f}{_between(bench.get('acceptance_length_interval'), '.3f')}",
        ),
        ("accepted per position", per_position),
        ("tokens per step really returned", f"{bench['useful_tokens_per_step']:.3f}"),
        ("output tokens/s", f"{bench['tokens_per_s']:.1f}"),
    ]
    if bench.get("speedup") is not None:
        gain = f"{bench['speedup']:.2f}x{_between(bench.get('speedup_interval'), '.2f')}"
        rows += [("without speculation", f"{bench['baseline_tokens_per_s']:.1f}"), ("speedup", gain)]
    for subset in bench.get("subsets") or ():
        length = subset["acceptance"]["acceptance_length"]
        if length is not None:
            rows.append((f"acceptance length, {subset['name']}", f"{length:.3f}"))
    if predicted := bench.get("predicted"):
        verdict = "agrees" if predicted["agrees"] else "does not agree"
        rows.append(
            (f"predicted without vLLM, {predicted['dtype']}", f"{predicted['acceptance_length']:.3f}, {verdict}")
        )
    table = "\n".join(f"| {_cell(name)} | {value} |" for name, value in rows)
    decoding = f"temperature {bench['temperature']}" if bench.get("temperature") else "greedy"
    conditions = (
        f"K={bench['k']}, {bench['prompts']} prompts, {bench.get('concurrency', 1)} at once, {decoding}, "
        f"vLLM {versions.get('vllm')}; intervals: 95 %, bootstrap over prompts. Acceptance length = 1 + accepted / "
        "drafts, from vLLM's own counters."
    )
    return f"## Measured\n\n| | |\n|---|---|\n{table}\n\n{conditions}\n"


def _between(interval: Any, form: str) -> str:
    return f" ({interval[0]:{form}} to {interval[1]:{form}})" if interval else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
