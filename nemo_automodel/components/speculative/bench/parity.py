# SPDX-License-Identifier: Apache-2.0
"""Train/serve parity: what the reference decoder predicts beside what the server did (design section 6).

A plausible acceptance length proves little: aux ids off by one, a wrong mask token or fc blocks in the wrong order each
cost less than 0.2. In float32 the counts must be identical; in bfloat16 each position may differ by rounding.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping

from nemo_automodel.components.datasets.rows import ChatRow
from nemo_automodel.components.speculative.bench.metrics import acceptance_length, per_position
from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters
from nemo_automodel.components.speculative.serve.process import find_cause
from nemo_automodel.components.speculative.serve.types import Fixups
from nemo_automodel.errors import LaunchError
from nemo_automodel.files import read_json, write_atomic, write_json

TOLERANCE = 0.02  # per position in bfloat16; 0.012 was the most seen
REFERENCE = "nemo_automodel.components.speculative.bench.reference"
WHERE_TO_LOOK = "look at the aux layer ids, rope, mask token, vocabulary map (d2t) and missing tensors of the draft"


@dataclass(frozen=True)
class Prediction:
    """What the reference decoder counted for the same prompts."""

    acceptance_length: float
    acceptance_per_position: tuple[float, ...]  # [K]
    num_drafts: int
    dtype: str  # "float32" or "bfloat16"
    max_difference: float  # largest |predicted - served| over positions
    agrees: bool  # float32: counts identical; bfloat16: max_difference <= TOLERANCE


@dataclass(frozen=True)
class ParityJob:
    """One run of the reference decoder; files are written into `job_dir`."""

    job_dir: Path
    target: str
    draft: Path
    prompts: tuple[ChatRow, ...]
    max_new_tokens: int
    num_speculative_tokens: int
    dtype: str
    trust_remote_code: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def reference_dtype(dtype: str) -> str:
    """The reference's dtype for a vLLM --dtype: vLLM's `auto` never serves float32, and bfloat16 stands in for half."""
    return "float32" if dtype in ("float32", "float") else "bfloat16"


def unpredictable(fixups: Fixups) -> str | None:
    """The form of this draft when the reference decoder does not know it."""
    names = set(fixups.renames.values()) | set(fixups.copies)
    forms = {"fc_norm": "fc_norm", "input_norm.": "norm_before_fc", ".bias": "attention_bias"}
    for part, form in forms.items():
        if any(part in name for name in names):
            return f"drafts with {form}"
    shared = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in names]
    return f"drafts that share the target's {shared[0]}" if shared else None


def predict(job: ParityJob) -> SpecDecodeCounters:
    """Run the reference decoder in a process of its own, so that this one never holds a model.

    Raises:
        LaunchError: it failed; the telling line of its output is given.
    """
    prompts, spec, out = (job.job_dir / f"parity_{name}" for name in ("prompts.jsonl", "job.json", "out.json"))
    log = job.job_dir / "parity.log"
    write_atomic(prompts, "".join(json.dumps(_row(row), ensure_ascii=False) + "\n" for row in job.prompts))
    write_json(
        spec,
        {
            "target": job.target,
            "draft": str(job.draft),
            "prompts": str(prompts),
            "num_prompts": len(job.prompts),
            "max_new_tokens": job.max_new_tokens,
            "num_speculative_tokens": job.num_speculative_tokens,
            "dtype": job.dtype,
            "trust_remote_code": job.trust_remote_code,
            "chat_template_kwargs": dict(job.template_kwargs),
        },
    )
    with log.open("wb") as sink:
        argv = [sys.executable, "-m", REFERENCE, "--job", str(spec), "--out", str(out)]
        code = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, check=False).returncode
    if code != 0:
        raise LaunchError(
            f"the reference decoder failed, exit code {code}: {find_cause(log.read_text(errors='replace'))}",
            where="serve.benchmark.parity",
            remedy=f"see {log}, or serve.benchmark.parity=false",
        )
    result = read_json(out)
    accepted, drafts = tuple(result["accepted_per_position"]), result["num_drafts"]
    return SpecDecodeCounters(drafts, drafts * len(accepted), sum(accepted), accepted)


def _row(row: ChatRow) -> dict[str, Any]:
    return {"messages": list(row.messages)} | ({"tools": list(row.tools)} if row.tools else {})


def compare(predicted: SpecDecodeCounters, served: SpecDecodeCounters, dtype: str) -> Prediction:
    """Hold the two side by side; `agrees` follows the dtype's rule."""
    pairs = zip(per_position(predicted), per_position(served), strict=True)
    difference = max((abs(p - s) for p, s in pairs), default=0.0)
    return Prediction(
        acceptance_length=acceptance_length(predicted),
        acceptance_per_position=per_position(predicted),
        num_drafts=predicted.num_drafts,
        dtype=dtype,
        max_difference=difference,
        agrees=predicted == served if dtype == "float32" else difference <= TOLERANCE,
    )
