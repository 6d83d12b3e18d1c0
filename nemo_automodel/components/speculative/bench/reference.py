# SPDX-License-Identifier: Apache-2.0
"""The reference decoder: predicts vLLM's draft and accepted counts with plain PyTorch, greedy (design section 6).

    python -m nemo_automodel.components.speculative.bench.reference --job job.json --out out.json

vLLM's counting (0.32, `v1/core/sched/scheduler.py`): the prefill's token counts no draft; every later step counts one
draft and all K positions, also when fewer tokens are left; accepted tokens past the end are counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from nemo_automodel.components.datasets.rows import ChatRow, load_rows
from nemo_automodel.components.speculative.draft.io import load_draft, read_sliding_window
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.draft.peagle import PEagleDraft
from nemo_automodel.components.speculative.methods.attention import CrossDepthAttention
from nemo_automodel.components.speculative.methods.cod import pack_elements
from nemo_automodel.components.speculative.target import Target
from nemo_automodel.errors import ConfigError, DataError, UserError
from nemo_automodel.files import read_json, write_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BATCH = 16  # prompts at a time


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


@dataclass(frozen=True)
class Counts:
    """What vLLM's counters would say, added up over the prompts; the keys of out.json."""

    num_drafts: int
    accepted_per_position: tuple[int, ...]  # [K]
    num_prompts: int
    output_tokens: int  # end-of-turn tokens included


@dataclass(frozen=True)
class Row:
    """One prompt and what the target says greedily, K + 1 tokens past the end of the answer."""

    prompt: list[int]
    continuation: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.continuation


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
        rows = continue_greedily(target, prompts[start : start + BATCH], stops, job)
        _check_window(Path(job.draft), rows)
        proposals = propose_all(draft, target, rows, job.num_speculative_tokens)
        counts += [walk(row, p, stops, job.max_new_tokens) for row, p in zip(rows, proposals, strict=True)]
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
        turns = list(row.messages)
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if turns:
            asked.append(replace(row, messages=tuple(turns)))
        if len(asked) == job.num_prompts:
            break
    if not asked:
        raise DataError(f"{job.prompts} holds nothing to ask", where="prompts", remedy="name rows with a user turn")
    return asked


def stop_ids(target: Target, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end an answer in vLLM: the tokenizer's end of sequence and those of generation_config.json.

    Raises:
        ConfigError: generation_config.json asks for a repetition penalty, which vLLM applies and this decoder does not.
    """
    config: GenerationConfig = target.model.generation_config
    if config.repetition_penalty not in (None, 1.0):
        raise ConfigError(
            f"the target's generation_config.json sets repetition_penalty={config.repetition_penalty}",
            where="target.path",
            remedy="serve.benchmark.parity=false",
        )
    ids = config.eos_token_id
    listed = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in [*listed, tokenizer.eos_token_id] if i is not None)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: ChatRow, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Token ids as vLLM's chat endpoint builds them: the template's text, tokenised without extra special tokens."""
    fixed = {"tools": list(map(dict, row.tools)) or None, "tokenize": False, "add_generation_prompt": True}
    text = tokenizer.apply_chat_template(list(map(dict, row.messages)), **{**template_kwargs, **fixed})
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def continue_greedily(target: Target, prompts: list[list[int]], stops: frozenset[int], job: Job) -> list[Row]:
    """The target's greedy answers, each K + 1 tokens past its end: vLLM verifies drafts there too."""
    model, extra = target.model, job.num_speculative_tokens + 1
    width, device = max(map(len, prompts)), model.device
    ids = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)  # padded on the left
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    answers: list[list[int]] = [[] for _ in prompts]
    wanted, cache = [job.max_new_tokens + extra] * len(prompts), None
    while any(len(a) < w for a, w in zip(answers, wanted, strict=True)):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
        positions = positions[:, -1:] + 1
        for row, token in enumerate(ids[:, 0].tolist()):
            answers[row].append(token)
            if token in stops:
                wanted[row] = min(wanted[row], len(answers[row]) + extra)
    return [Row(p, a[:w]) for p, a, w in zip(prompts, answers, wanted, strict=True)]


@torch.no_grad()
def propose_all(draft: DraftNetwork, target: Target, rows: list[Row], depths: int) -> list[dict[int, list[int]]]:
    """What the draft proposes after every anchor: row -> anchor -> K target ids.

    Anchor a is the last position whose token the target has seen; token a + 1 is the one it just chose.
    """
    device = target.model.device
    lengths = torch.tensor([len(row.ids) for row in rows], device=device)
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64, device=device)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids, device=device)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    aux = target.states(ids, mask.long()).aux
    if isinstance(draft, PEagleDraft):
        proposed = _propose_parallel(draft, ids, aux, rows, depths)
    else:
        proposed = [
            draft.propose(ids[i, 1 : len(row.ids)], aux[i, : len(row.ids) - 1], len(row.prompt) - 1, depths)
            for i, row in enumerate(rows)
        ]
    return [
        {len(row.prompt) - 1 + i: line for i, line in enumerate(tokens.tolist())}
        for row, tokens in zip(rows, proposed, strict=True)
    ]


def _propose_parallel(draft: PEagleDraft, ids: Tensor, aux: Tensor, rows: list[Row], depths: int) -> list[Tensor]:
    """All anchors and depths in one forward; ids [B, L], aux [B, L, 3H] -> per row [anchors, K]."""
    size = ids.shape[1] - 1
    kept = torch.zeros(len(rows), size, depths, dtype=torch.bool, device=ids.device)
    for index, row in enumerate(rows):
        kept[index, len(row.prompt) - 1 : len(row.ids) - 1] = True
    hidden = draft(ids[:, 1:], aux[:, :size], CrossDepthAttention(pack_elements(kept), size))
    proposed: list[Tensor] = []
    for index, row in enumerate(rows):
        count = len(row.continuation)  # anchors
        ground = hidden[index, len(row.prompt) - 1 : len(row.ids) - 1, None]  # [count, 1, H]
        chain = hidden[index, size : size + count * (depths - 1)].unflatten(0, (count, depths - 1))
        proposed.append(draft.choose(torch.cat((ground, chain), dim=1)))
    return proposed


def walk(row: Row, proposals: dict[int, list[int]], stops: frozenset[int], max_new_tokens: int) -> Counts:
    """vLLM's loop over one answer: prefill, then draft, verify and count until a stop token or the limit."""
    depths = len(next(iter(proposals.values())))
    accepted, drafts, done = [0] * depths, 0, 1  # the prefill gives one token and counts nothing
    stopped = row.continuation[0] in stops
    while not stopped and done < max_new_tokens:
        proposal = proposals[len(row.prompt) + done - 2]  # the newest token is continuation[done - 1]
        matched = 0
        while matched < depths and proposal[matched] == row.continuation[done + matched]:
            accepted[matched] += 1
            matched += 1
        drafts += 1
        gained = row.continuation[done : done + matched + 1]
        ends = [i for i, token in enumerate(gained) if token in stops]
        stopped = bool(ends)
        done += ends[0] + 1 if stopped else len(gained)
    return Counts(drafts, tuple(accepted), 1, min(done, max_new_tokens))


def add_counts(counts: list[Counts]) -> Counts:
    """Sum over prompts."""
    per_position = tuple(map(sum, zip(*(c.accepted_per_position for c in counts), strict=True)))
    drafts, tokens = sum(c.num_drafts for c in counts), sum(c.output_tokens for c in counts)
    return Counts(drafts, per_position, len(counts), tokens)


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
