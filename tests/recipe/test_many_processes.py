# SPDX-License-Identifier: Apache-2.0
"""The recipe itself under torchrun: composed once, one folder, one result; the others end quietly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from test_command_line import ENV, RECIPE, SHORT, only


def test_under_torchrun_the_first_process_alone_composes_and_writes(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, RECIPE[1], *SHORT], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run_dir = only(tmp_path, "outputs/quickstart/*")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert done.stderr.count("step 3/3") == 1
    assert json.loads((run_dir / "result.json").read_text())["status"] == "ok"
    assert (run_dir / "checkpoints" / "BEST").resolve().name == "epoch_1_step_3"
