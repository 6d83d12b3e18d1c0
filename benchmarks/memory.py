# SPDX-License-Identifier: Apache-2.0
"""How the memory of a P-EAGLE training step grows with the length of a row, with and without sequence partitions.

    python benchmarks/memory.py [--tokens 512,1024,2048,4096,8192] [--partitions 1,4]

Shape S of `train_step.py`, every token supervised, each cell in a process of its own; MiB above what was resident
before the first step, and per 1,000 tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from train_step import HUGE_PAGES, run_child


def main() -> None:
    """Print a line per length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="512,1024,2048,4096,8192")
    parser.add_argument("--partitions", default="1,4")
    arguments = parser.parse_args()
    lengths, parts = ([int(n) for n in value.split(",")] for value in (arguments.tokens, arguments.partitions))
    script = str(Path(__file__).with_name("train_step.py"))
    print(
        f"{'tokens':>7}" + "".join(f"{f'S={s}: MiB':>14}{'per 1,000':>11}{'estimated':>11}{'CPU s':>8}" for s in parts)
    )
    for tokens in lengths:
        line = f"{tokens:>7}"
        for partitions in parts:
            words = ["--child", "S", "--steps", "1", "--tokens", str(tokens), "--partitions", str(partitions)]
            got = run_child([sys.executable, script, *words], **HUGE_PAGES)
            above = got["above_mb"]
            line += f"{above:>14.0f}{above / tokens * 1000:>11.0f}{got['estimate_mb']:>11.0f}{got['cpu_s']:>8.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
