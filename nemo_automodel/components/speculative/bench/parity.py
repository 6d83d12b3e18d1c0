# SPDX-License-Identifier: Apache-2.0
"""Train/serve parity: what the reference decoder predicts beside what the server did (design section 6).

A plausible acceptance length proves little: aux ids off by one, a wrong mask token or fc blocks in the wrong order each
cost less than 0.2. In float32 the counts must be identical; in bfloat16 each position may differ by rounding.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

from nemo_automodel.components.datasets.rows import ChatRow
from nemo_automodel.components.speculative.bench.diagnose import (
    TOLERANCE,
    Cause,
    Diagnosis,
    compare_folders,
    judge_counts,
)
from nemo_automodel.components.speculative.bench.metrics import acceptance_length, per_position
from nemo_automodel.components.speculative.serve.causes import find_cause
from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters
from nemo_automodel.components.speculative.serve.export import write_weights
from nemo_automodel.components.speculative.serve.export_plan import CONFIG, WEIGHTS, ExportPlan
from nemo_automodel.components.speculative.serve.types import Fixups
from nemo_automodel.errors import LaunchError
from nemo_automodel.files import read_json, write_atomic, write_json

REFERENCE = "nemo_automodel.components.speculative.bench.reference"
PARITY_JOB, PARITY_PROMPTS = "parity_job.json", "parity_prompts.jsonl"
HYPOTHESES = "nemo_automodel.components.speculative.bench.hypotheses"


@dataclass(frozen=True)
class Prediction:
    """What the reference decoder counted for the same prompts."""

    acceptance_length: float
    acceptance_per_position: tuple[float, ...]  # [K]
    num_drafts: int
    dtype: str  # "float32" or "bfloat16"
    max_difference: float  # largest |predicted - served| over positions
    agrees: bool  # float32: counts identical; bfloat16: max_difference <= TOLERANCE
    export_differences: tuple[Cause, ...] = ()  # between the served folder and an export made anew
    diagnosis: Diagnosis | None = None  # when they part


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
    forms = {"input_norm.": "norm_before_fc", ".bias": "attention_bias"}
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
    prompts, spec = job.job_dir / PARITY_PROMPTS, job.job_dir / PARITY_JOB
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
    result = _run(REFERENCE, job.job_dir, "parity")
    accepted, drafts = tuple(result["accepted_per_position"]), result["num_drafts"]
    return SpecDecodeCounters(drafts, drafts * len(accepted), sum(accepted), accepted)


def diagnose(job_dir: Path, served: SpecDecodeCounters, dtype: str) -> Diagnosis:
    """Search for what gives the served counts; `predict` has left its job in `job_dir`.

    Raises:
        LaunchError: the search failed; the telling line of its output is given.
    """
    return judge_counts(_run(HYPOTHESES, job_dir, "hypotheses")["tried"], served, dtype)


def _run(module: str, job_dir: Path, name: str) -> dict[str, Any]:
    """`module` on parity_job.json; its answer."""
    out, log = job_dir / f"{name}_out.json", job_dir / f"{name}.log"
    with log.open("wb") as sink:
        argv = [sys.executable, "-m", module, "--job", str(job_dir / PARITY_JOB), "--out", str(out)]
        code = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, check=False).returncode
    if code != 0:
        raise LaunchError(
            f"the reference decoder failed, exit code {code}: {find_cause(log.read_text(errors='replace'))}",
            where="serve.benchmark.parity",
            remedy=f"see {log}, or serve.benchmark.parity=false",
        )
    return read_json(out)


@contextlib.contextmanager
def anew(plan: ExportPlan, job_dir: Path) -> Iterator[Path]:
    """The export that the checkpoint makes today, for as long as the block lasts: what is served is judged by it,
    never by itself."""
    folder = job_dir / "parity_export"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_weights(plan, folder / WEIGHTS)
        write_json(folder / CONFIG, dict(plan.config))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def examine_served(
    job: ParityJob, plan: ExportPlan, folder: Path, served: SpecDecodeCounters, say: Callable[[str], None]
) -> Prediction:
    """Predict from the checkpoint, compare with what `folder` did when it was served, and search when they part.

    Raises:
        LaunchError: the reference decoder failed.
    """
    with anew(plan, job.job_dir) as fresh:
        differences = compare_folders(fresh, folder)
        prediction = compare(predict(replace(job, draft=fresh)), served, job.dtype)
        diagnosis = None
        if not prediction.agrees:
            say(f"warning: served and predicted acceptance differ by {prediction.max_difference:.3f}: looking for why")
            try:
                diagnosis = diagnose(job.job_dir, served, job.dtype)
                say(f"warning: {diagnosis.sentence()}")
            except LaunchError as error:  # that they part is known all the same
                say(f"warning: {error}")
    for cause in differences:
        say(f"warning: the served export is not what the checkpoint gives: {cause.what}")
    return replace(prediction, export_differences=differences, diagnosis=diagnosis)


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
