# SPDX-License-Identifier: Apache-2.0
"""What a P-EAGLE training step costs: CPU seconds, tokens/s and memory, for us and for NeMo Automodel 0.7.0.

    OMP_NUM_THREADS=1 python benchmarks/train_step.py [--cases S,L,L8192] [--steps 8] [--peer-python /venv/bin/python]

A step is target forward, draft forward, backward, clipping and AdamW, on 512 supervised tokens, micro batch 1, fp32,
with a random target. Every case runs in a process of its own, first ours, then the peer's where a Python that has it is
named. CPU seconds, not wall time: they vary less beside other work. Memory is the peak over what was resident before
the first step, in MiB; `estimated` is what train/estimate.py says of it. The first step, which allocates, is in the
memory and not in the time. `floor`: the matrix products alone, at the rate at which this CPU multiplies at that moment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

K, RATIO, RATIO_MIN, LAYERS, TOKENS = 8, 0.7, 0.2, 2, 512
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
PEER = Path(__file__).with_name("train_step_peer.py")


@dataclass(frozen=True)
class Case:
    """A target's shape and the draft's vocabulary."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int  # of the MLP
    vocab: int
    aux: tuple[int, int, int]  # residual streams entering these layers
    draft_vocab: int | None = None  # None: full


S = Case(256, 8, 4, 2, 768, 512, (2, 4, 5))
CASES = {
    "S": S,
    "L": Case(512, 4, 8, 4, 1536, 151_936, (1, 2, 3)),
    "L8192": Case(512, 4, 8, 4, 1536, 151_936, (1, 2, 3), 8192),
}


def target_config(case: Case) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=case.vocab, hidden_size=case.hidden, intermediate_size=case.inner, num_hidden_layers=case.layers,
        num_attention_heads=case.heads, num_key_value_heads=case.kv_heads, head_dim=case.hidden // case.heads,
        max_position_embeddings=16_384, tie_word_embeddings=False, initializer_range=0.05,
    )  # fmt: skip


def build_target(case: Case) -> Any:
    """A random Qwen3ForCausalLM; both trainers get this one."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(target_config(case)).eval()


def build_spec(case: Case, tokens: int) -> Any:
    """Our draft's shape."""
    from nemo_automodel.components.speculative.target import build_draft_spec, dims_of
    from nemo_automodel.config.schema import DraftConfig

    config = DraftConfig(
        num_layers=LAYERS, num_depths=K, down_sample_ratio=RATIO, down_sample_ratio_min=RATIO_MIN, mask_token_id=3,
        draft_vocab_size=case.draft_vocab, aux_layer_ids=list(case.aux),
    )  # fmt: skip
    return build_draft_spec(dims_of(target_config(case)), config, seq_length=tokens)


def our_step(case: Case, *, tokens: int = TOKENS, partitions: int = 1) -> Callable[[], Any]:
    """One optimiser step through the product's own code."""
    import torch

    from nemo_automodel.components.speculative.draft.build import build_draft
    from nemo_automodel.components.speculative.methods.batch import TrainBatch
    from nemo_automodel.components.speculative.methods.partition import return_freed_memory
    from nemo_automodel.components.speculative.methods.peagle import forward_to_loss, teacher_head
    from nemo_automodel.components.speculative.target import Target
    from nemo_automodel.components.speculative.train.optim import build_optimizer
    from nemo_automodel.config.schema import TrainConfig

    if partitions > 1:
        return_freed_memory()
    target, spec = Target(build_target(case), case.aux), build_spec(case, tokens)
    ids = torch.arange(case.draft_vocab) if case.draft_vocab else None
    draft = build_draft(spec, embed_weight=target.embed_weight, lm_head_weight=target.lm_head_weight, vocab_ids=ids)
    teacher = teacher_head(draft, target.lm_head_weight)
    optimizer = build_optimizer(draft, TrainConfig())
    trained = [p for p in draft.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    marked = torch.ones(1, tokens, dtype=torch.bool)
    starts = torch.zeros(1, tokens, dtype=torch.int64)

    def step() -> None:
        rows = torch.randint(0, case.vocab, (1, tokens), generator=generator)
        batch = TrainBatch(rows, marked, torch.tensor([tokens]), starts)
        optimizer.zero_grad(set_to_none=True)
        states = target.states(rows, marked.long(), starts)
        out = forward_to_loss(draft, batch, states, teacher, generator, partitions=partitions)
        out.loss_sum.backward()
        for parameter in trained:
            parameter.grad.div_(out.count)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return step


def estimated_mb(case: Case, tokens: int = TOKENS, partitions: int = 1) -> float:
    """What `train/estimate.py` says that the first steps add, in MiB."""
    from nemo_automodel.components.speculative.train.estimate import estimate_memory

    spec = build_spec(case, tokens)
    said = estimate_memory(
        spec, target_parameters=0, target_bytes=4, seq_length=tokens, micro_batch_size=1, partitions=partitions
    )
    return said.above_weights / 2**20


def status_mb(key: str) -> float:
    """VmRSS or VmHWM of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def measure(step: Callable[[], Any], steps: int, tokens: int = TOKENS) -> dict[str, float]:
    """CPU seconds per step (the first one apart), tokens per CPU second, peak MiB and MiB above the start."""
    before = status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    step()
    used = [time.process_time()]
    for _ in range(steps):
        step()
        used.append(time.process_time())
    each = sorted(b - a for a, b in zip(used, used[1:]))
    middle = each[len(each) // 2]
    peak = status_mb("VmHWM")
    return {"cpu_s": middle, "tokens_per_s": tokens / middle, "peak_mb": peak, "above_mb": peak - before}


def floor_s(case: Case, tokens: int = TOKENS) -> float:
    """Seconds that a step's matrix products alone take at the rate at which this CPU multiplies, measured now."""
    import torch

    from nemo_automodel.components.speculative.matmul import times_transposed

    left, right = torch.randn(512, 512), torch.randn(4096, 512)
    times_transposed(left, right)
    began = time.process_time()
    for _ in range(20):
        times_transposed(left, right)
    rate = 20 * left.shape[0] * right.numel() / (time.process_time() - began)  # multiply-adds per second
    chains = sum(max(RATIO**d, RATIO_MIN) for d in range(1, K)) * tokens  # elements of depth >= 1
    h, kv = case.hidden, case.kv_heads * case.hidden // case.heads
    qkv, rest = h * (h + 2 * kv), h * h + 3 * h * case.inner
    both = tokens + chains
    draft = tokens * (3 * h * h + 2 * qkv) + both * (LAYERS * rest + (LAYERS - 1) * qkv)
    draft += 2 * LAYERS * (both * tokens / 2 + both * 4) * h  # attention: scores and their values
    vocab = case.draft_vocab or case.vocab
    target = tokens * (case.layers * (qkv + rest) + vocab * h) + case.layers * tokens**2 * h
    return (3 * (draft + both * vocab * h) + target) / rate


def run_child(argv: list[str], **environment: str) -> dict[str, float]:
    """The figures that a child prints as JSON on its last line."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run every case for us, then for the peer, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="S,L,L8192")
    parser.add_argument("--steps", type=int, help="timed steps per case (default: 20 for S, 4 else)")
    parser.add_argument("--peer-python", help="a Python that has nemo_automodel==0.7.0")
    parser.add_argument("--child", choices=sorted(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help=argparse.SUPPRESS)
    parser.add_argument("--partitions", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        case = CASES[arguments.child]
        step = our_step(case, tokens=arguments.tokens, partitions=arguments.partitions)
        got = measure(step, arguments.steps, arguments.tokens)
        said = estimated_mb(case, arguments.tokens, arguments.partitions)
        print(json.dumps(got | {"estimate_mb": said, "floor_s": floor_s(case, arguments.tokens)}))
        return
    who = [("ours", sys.executable, Path(__file__))]
    who += [("NeMo Automodel", arguments.peer_python, PEER)] if arguments.peer_python else []
    columns = {"cpu_s": "CPU s/step", "floor_s": "floor", "tokens_per_s": "tokens/s", "peak_mb": "peak MiB",
               "above_mb": "above MiB", "estimate_mb": "estimated"}  # fmt: skip
    print(" " * 24 + "".join(f"{title:>11}" for title in columns.values()))
    for case in arguments.cases.split(","):
        for name, python, script in who:
            steps = arguments.steps or (20 if case == "S" else 4)
            own = HUGE_PAGES if name == "ours" else {}  # what train/workers.py sets for the process that trains
            got = run_child([python, str(script), "--child", case, "--steps", str(steps)], **own)
            cells = (
                f"{got[key]:>11.{3 if key in ('cpu_s', 'floor_s') else 0}f}" if key in got else " " * 11
                for key in columns
            )
            print(f"{case:<8}{name:<16}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
