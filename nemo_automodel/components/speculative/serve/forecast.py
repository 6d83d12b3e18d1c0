# SPDX-License-Identifier: Apache-2.0
"""print_only for a draft that is not trained yet: the line that would train, export and serve it."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

from nemo_automodel.components.speculative.serve.command import (
    build_baseline_command,
    build_command,
    command_warnings,
)
from nemo_automodel.components.speculative.serve.export_plan import EXPORT_DIR
from nemo_automodel.components.speculative.serve.export_line import export_line
from nemo_automodel.components.speculative.serve.record import JobRecord
from nemo_automodel.components.speculative.serve.report import Report
from nemo_automodel.components.speculative.serve.runtime import make_line, resolve_release, settle_runtime
from nemo_automodel.components.speculative.serve.target_facts import absolute_target, read_target_or_none
from nemo_automodel.components.speculative.serve.types import Fixups, ServeSpec
from nemo_automodel.config.schema import DraftConfig, DraftKind


def print_forecast(spec: ServeSpec, train_line: str, draft: DraftConfig, *, base_dir: Path, run_dir: Path) -> int:
    """Print one shell line: train into `run_dir`, export its LATEST checkpoint, serve the export. Starts nothing.

    Raises:
        UserError: an unknown vLLM release, or a flag that cannot be passed.
    """
    record, report = JobRecord(run_dir, str(run_dir)), Report()
    record.stage = "command"
    spec = settle_runtime(spec, report.say, start=False)
    found = resolve_release(spec)
    record.vllm(found.installed, found.release.version)
    _, unread = read_target_or_none(spec.target, base_dir)
    for line in (*found.warnings, *([unread] if unread else []), *command_warnings(spec, found.release, os.environ)):
        report.warn(line)
    model = run_dir / "checkpoints" / "LATEST" / "model"
    if spec.export_dir is not None:
        report.warn("the names of folders under serve.export_dir depend on the checkpoint: shown beside its weights")
    parallel, k = draft.kind is DraftKind.peagle, spec.num_speculative_tokens or draft.trained_depth
    planned = Fixups({}, (), {}, (), (), parallel_drafting=parallel, num_speculative_tokens=k)
    served = replace(spec, target=absolute_target(spec.target, base_dir), export_dir=None)
    place = (spec.python, spec.port)
    if spec.speculates:
        command = build_command(model / EXPORT_DIR, planned, served, found.release, *place, os.environ)
    else:
        command = build_baseline_command(served, found.release, *place, environ=os.environ)
    record.command(command)
    record.save("printed")
    made = [shlex.join(line)] if (line := make_line(spec)) else []
    report.say("would train, then export the last checkpoint, then start the server:")
    exporting = [export_line(served, str(model), found.release)] if spec.speculates else []
    print(" && ".join([*made, train_line, *exporting, command.shell()]), flush=True)
    return 0
