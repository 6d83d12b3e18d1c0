# SPDX-License-Identifier: Apache-2.0
"""The reference decoder's command line: predicts vLLM's draft and accepted counts for a workload (see `decoder`).

python -m nemo_automodel.components.speculative.bench.reference --job job.json --out out.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from nemo_automodel.components.datasets.rows import ChatRow, load_rows
from nemo_automodel.components.speculative.decoder import (
    BATCH,
    Counts,
    Limits,
    Row,
    add_counts,
    continue_greedily,
    count_drafts,
    cut_answer,
    prompt_ids,
    stop_ids,
)
from nemo_automodel.components.speculative.draft.io import load_draft, read_sliding_window
from nemo_automodel.components.speculative.target import Target
from nemo_automodel.errors import ConfigError, DataError, UserError
from nemo_automodel.files import read_json, write_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """What to predict; the keys of job.json."""

    target: str  # folder or Hub id
    draft: str  # exported (vLLM-form) folder
    prompts: str  # chat rows (and their `tools`); trailing assistant turns are left out
    num_prompts: int
    max_new_tokens: int
    num_speculative_tokens: int  # K
    dtype: str  # "float32" or "bfloat16"
    trust_remote_code: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def limits(self) -> Limits:
        return Limits(self.max_new_tokens, self.num_speculative_tokens)


def predict_counts(job: Job) -> Counts:
    """Load target and draft and predict the counts of the whole job.

    Raises:
        UserError: the job, target or draft cannot be used; which part is named.
    """
    draft = load_draft(Path(job.draft))[0].to(DTYPES[job.dtype]).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load(
        job.target,
        aux_layer_ids=draft.spec.aux_layer_ids,
        dtype=DTYPES[job.dtype],
        device=device,
        trust_remote_code=job.trust_remote_code,
    )
    tokenizer = AutoTokenizer.from_pretrained(job.target, trust_remote_code=job.trust_remote_code)
    stops = stop_ids(target, tokenizer)
    prompts = [prompt_ids(tokenizer, row, job.chat_template_kwargs) for row in load_questions(job)]
    draft = draft.to(device)
    counts: list[Counts] = []
    for start in range(0, len(prompts), BATCH):
        rows = continue_greedily(target, prompts[start : start + BATCH], stops, job.limits)
        _check_window(Path(job.draft), rows)
        counts += count_drafts(draft, target, rows, stops, job.limits)
    return add_counts(counts)


def _check_window(folder: Path, rows: list[Row]) -> None:
    """Refuse rows that do not fit into the draft's sliding window: attention here is always full."""
    window, longest = read_sliding_window(folder), max(len(row.ids) for row in rows)
    if window and longest > window:
        raise ConfigError(
            f"a prompt and its answer take {longest} tokens, the draft's sliding window is {window}",
            where=str(folder),
            remedy="serve.benchmark.parity=false, or ask shorter prompts",
        )


def load_questions(job: Job) -> list[ChatRow]:
    """The rows that `load_prompts` takes, with their tools."""
    asked: list[ChatRow] = []
    for row in load_rows(job.prompts, where="prompts"):
        if (question := cut_answer(row)) is not None:
            asked.append(question)
        if len(asked) == job.num_prompts:
            break
    if not asked:
        raise DataError(f"{job.prompts} holds nothing to ask", where="prompts", remedy="name rows with a user turn")
    return asked


def read_job(path: Path) -> Job:
    """Read job.json.

    Raises:
        ConfigError: it is no JSON object with the keys of `Job`, or a value is out of range.
    """
    remedy = f"give a JSON object with {', '.join(Job.__dataclass_fields__)}"
    try:
        job = Job(**read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"no usable job ({error})", where=str(path), remedy=remedy) from error
    if not isinstance(job.chat_template_kwargs, Mapping):
        raise ConfigError("chat_template_kwargs is no object", where=str(path), remedy="give a JSON object, such as {}")
    if job.dtype not in DTYPES:
        raise ConfigError(f"dtype {job.dtype!r}", where=str(path), remedy=f"one of {', '.join(DTYPES)}")
    if min(job.num_prompts, job.max_new_tokens, job.num_speculative_tokens) < 1:
        raise ConfigError(
            "num_prompts, max_new_tokens and num_speculative_tokens must be at least 1",
            where=str(path),
            remedy="raise the one that is below 1",
        )
    return job


def answer_job(argv: list[str] | None, description: str, answer: Callable[[Job], dict[str, Any]]) -> int:
    """A command line that reads a job and writes its answer; exit code 1 and one line on a user's mistake."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--job", type=Path, required=True, help="JSON object with the keys of Job")
    parser.add_argument("--out", type=Path, required=True, help="where the answer is written, as JSON")
    args = parser.parse_args(argv)
    try:
        write_json(args.out, answer(read_job(args.job)))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def main(argv: list[str] | None = None) -> int:
    """Command line: predict the counts of a job."""
    description = "Predict vLLM's speculative decoding counts for a greedy workload."
    return answer_job(argv, description, lambda job: asdict(predict_counts(job)))


if __name__ == "__main__":
    sys.exit(main())
