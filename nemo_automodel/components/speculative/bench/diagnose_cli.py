# SPDX-License-Identifier: Apache-2.0
"""Is what was served what was trained?

python -m nemo_automodel.components.speculative.serve_vllm diagnose --draft D --target T [--served DIR] [--run JOB_DIR]

`--served` is a folder that some vLLM loaded: it is compared with an export made anew from the checkpoint. `--run` is
the folder of a benchmark with `serve.benchmark.parity=true`: its counts are searched for a cause.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Sequence

from rich.console import Console

from nemo_automodel.components.speculative.bench.diagnose import Cause, Diagnosis, compare_folders
from nemo_automodel.components.speculative.bench.parity import PARITY_JOB, PARITY_PROMPTS, anew, diagnose
from nemo_automodel.components.speculative.serve.cli_words import OneLineParser
from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters
from nemo_automodel.components.speculative.serve.pipeline import plan_only
from nemo_automodel.components.speculative.serve.record import RESULT
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.errors import ConfigError
from nemo_automodel.files import read_json, write_json


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of `diagnose`."""
    parser = OneLineParser(
        prog=prog,
        description="Compare what was served with what was trained. Exit code: 0 no difference, 1 there is one.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--draft", required=True, help="the checkpoint as it was trained")
    add("--target", required=True, help="target model: a folder or a Hub id")
    add("--served", help="the folder that vLLM loaded as speculative_config.model")
    add("--run", help="job folder of a benchmark with serve.benchmark.parity=true")
    add("--vllm-version", default="auto", help="release to export for (default: the installed one, else the newest)")
    return parser


def run_diagnose(words: Sequence[str], *, prog: str) -> int:
    """Print what was checked and found on stdout; 1 when something differs.

    Raises:
        UserError: the draft cannot be exported, or a folder does not hold what it should.
    """
    args = build_parser(prog).parse_args(words)
    if not (args.served or args.run):
        raise ConfigError(
            "nothing to compare with", where="diagnose", remedy="add --served DIR, --run JOB_DIR, or both"
        )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    found = 0
    with tempfile.TemporaryDirectory() as scratch, _anew(args, scratch) as fresh:
        if args.served:
            found += _say_differences(console, _compare(fresh, Path(args.served).expanduser()))
        if args.run:
            found += _say_diagnosis(console, _search(fresh, Path(args.run).expanduser(), Path(scratch)))
    return 1 if found else 0


def _anew(args: argparse.Namespace, scratch: str) -> AbstractContextManager[Path]:
    """An export of the checkpoint as it is today, inside `scratch`."""
    spec = ServeSpec(args.draft, args.target, vllm_version=args.vllm_version, export_dir=scratch)
    return anew(plan_only(spec, base_dir=Path.cwd()).export, Path(scratch))


def _compare(fresh: Path, served: Path) -> tuple[Cause, ...]:
    try:
        return compare_folders(fresh, served)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no draft that can be compared ({error})", where=f"--served {served}", remedy="name the exported folder"
        ) from error


def _search(fresh: Path, run: Path, scratch: Path) -> Diagnosis:
    """Every hypothesis about the counts of a benchmark, from the checkpoint's own weights."""
    try:
        bench, job = read_json(run / RESULT)["benchmark"], read_json(run / PARITY_JOB)
        drafts, shares = bench["num_drafts"], bench["acceptance_per_position"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no benchmark with a prediction ({error})", where=f"--run {run}", remedy="serve.benchmark.parity=true"
        ) from error
    accepted = tuple(round(share * drafts) for share in shares)
    served = SpecDecodeCounters(drafts, drafts * len(accepted), sum(accepted), accepted)
    write_json(scratch / PARITY_JOB, job | {"draft": str(fresh), "prompts": str(run / PARITY_PROMPTS)})
    return diagnose(scratch, served, job["dtype"])


def _say_differences(console: Console, differences: Sequence[Cause]) -> int:
    console.print("served folder beside the checkpoint: config keys, tensor names, bytes of every tensor")
    for cause in differences:
        console.print(f"  {cause.area}: {cause.what}")
    if not differences:
        console.print("  no difference")
    return len(differences)


def _say_diagnosis(console: Console, diagnosis: Diagnosis) -> int:
    console.print(f"counts of the run, one thing wrong at a time: {', '.join(diagnosis.checked)}")
    for cause in diagnosis.causes:
        console.print(f"  {cause.area}: {cause.what} ({cause.proof})")
    if not diagnosis.causes:
        console.print(f"  {diagnosis.sentence()}")
    return len(diagnosis.causes) + (diagnosis.nearest is not None)
