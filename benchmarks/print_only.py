# SPDX-License-Identifier: Apache-2.0
"""How long printing the command takes, how much memory, and which heavy packages it loads (none).

    python benchmarks/print_only.py [--draft CHECKPOINT --target MODEL] [--runs 5]

Both command lines, each in processes of their own; without --draft the shipped target and a draft of random bytes. The
best time is printed (others' work on the machine only adds), as wall and as CPU seconds, and the highest peak memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "vllm", "numpy", "datasets", "httpx", "matplotlib", "huggingface_hub")
# Runs a file or module as `python` would, and says at its end what of HEAVY is loaded.
PROBE = f"""
import atexit, runpy, sys
atexit.register(lambda: print("loaded:", *[m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr))
way, what, sys.argv[1:] = sys.argv[1], sys.argv[2], sys.argv[3:]
sys.argv[0] = what
(runpy.run_path if way == "file" else runpy.run_module)(what, run_name="__main__")
"""


def commands(draft: str, target: str, work: Path) -> dict[str, list[str]]:
    """Name -> the words after the probe."""
    module = "nemo_automodel.components.speculative.serve_vllm"
    recipe = ["file", str(ROOT / "recipes" / "train_then_serve.py"), "-cn", "serve_only", "serve.print_only=true"]
    recipe += [f"serve.checkpoint='{draft}'", f"target.path='{target}'", "serve.port=0", f"hydra.run.dir={work}/run"]
    flags = ["--draft", draft, "--target", target, "--port", "0", "--print-only"]
    return {"serve_vllm --print-only": ["module", module, *flags], "recipe serve.print_only=true": recipe}


def measure(words: list[str]) -> tuple[float, float, float, str]:
    """(wall seconds, CPU seconds, peak MB, heavy packages that were loaded) of one process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    argv = [sys.executable, "-c", PROBE, *words]
    child = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"error: {' '.join(words)}: {said.strip()[-800:]}")
    loaded = said.rpartition("loaded:")[2].strip()
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, loaded


def main() -> None:
    """A line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft")
    parser.add_argument("--target", default=str(ROOT / "recipes" / "quickstart" / "target"))
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        draft, target = arguments.draft, arguments.target
        if draft is None:
            from export import write_draft

            write_draft(work / "draft", 0.7)
            draft, target = str(work / "draft"), str(work / "target")
        for way, words in commands(draft, target, work).items():
            runs = [measure(words) for _ in range(arguments.runs)]
            wall, cpu, peak = min(r[0] for r in runs), min(r[1] for r in runs), max(r[2] for r in runs)
            loaded = " ".join(sorted({r[3] for r in runs})) or "none of " + ", ".join(HEAVY)
            print(f"{way:<30} {wall:5.2f} s  {cpu:5.2f} CPU s  {peak:5.0f} MB peak  heavy packages: {loaded}")


if __name__ == "__main__":
    main()
