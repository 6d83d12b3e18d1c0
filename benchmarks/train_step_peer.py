# SPDX-License-Identifier: Apache-2.0
"""The other half of `train_step.py`: one case through NeMo Automodel 0.7.0's public classes, by `--peer-python`.

As shipped it does not train P-EAGLE on a CPU, since torch's flex_attention has no backward pass there: SDPA with the
same mask, dense, stands in for it. The target is transformers' own class, as a loader would give it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, Callable

import torch
import torch.nn.functional as F

sys.path = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parents[1]]  # theirs, not ours


def load_ours() -> Any:
    """`train_step.py` by its path: shapes, target and measuring are the same for both."""
    spec = importlib.util.spec_from_file_location("train_step", Path(__file__).with_name("train_step.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_step"] = module
    spec.loader.exec_module(module)
    return module


def use_sdpa() -> None:
    """The mask is made dense once a step; a row without any key (padding) sees itself."""
    from nemo_automodel.components.speculative.eagle import peagle_draft

    def build(self: Any, anchor_pos: Any, depth: Any, lengths: Any, total_seq_len: int) -> torch.Tensor:
        sees = peagle_draft.create_peagle_mask_mod(
            anchor_pos=anchor_pos, depth=depth, lengths=lengths, total_seq_len=total_seq_len
        )
        index = torch.arange(len(anchor_pos))
        mask = sees(None, None, index[:, None], index[None])
        return mask | torch.eye(len(index), dtype=torch.bool)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: torch.Tensor, scale: float) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=block_mask, scale=scale)

    peagle_draft._PeagleDraftMixin.build_peagle_block_mask = build
    peagle_draft._peagle_flex_attention = attend


def peer_step(ours: Any, case: Any, partitions: int) -> Callable[[], Any]:
    from nemo_automodel.components.speculative.eagle import PEagleTrainerModule
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
    from nemo_automodel.components.speculative.eagle.target import HFEagle3TargetModel

    use_sdpa()
    model = ours.build_target(case)
    target = HFEagle3TargetModel(model, aux_layer_ids=[k - 1 for k in case.aux])  # outputs of layers, not inputs
    config = copy.deepcopy(model.config)
    wanted = {
        "num_hidden_layers": ours.LAYERS, "parallel_drafting": True, "num_depths": ours.K, "mask_token_id": 3,
        "draft_vocab_size": case.draft_vocab or case.vocab, "target_hidden_size": case.hidden,
        "down_sample_ratio": ours.RATIO, "down_sample_ratio_min": ours.RATIO_MIN, "dtype": torch.float32,
    }  # fmt: skip
    for key, value in wanted.items():
        setattr(config, key, value)
    config._attn_implementation = "eager"  # its draft class names no other; P-EAGLE's attention is its own
    draft = LlamaEagle3DraftModel(config).float()
    ids = torch.arange(wanted["draft_vocab_size"])
    trainer = PEagleTrainerModule(
        draft, selected_token_ids=ids, selected_token_mask=torch.arange(case.vocab) < len(ids), num_depths=ours.K,
        mask_token_id=3, down_sample_ratio=ours.RATIO, down_sample_ratio_min=ours.RATIO_MIN,
        sequence_partitions=partitions,
    )  # fmt: skip
    trained = [p for p in trainer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    ones = torch.ones(1, ours.TOKENS, dtype=torch.int64)

    def step() -> None:
        rows = torch.randint(0, case.vocab, (1, ours.TOKENS), generator=generator)
        optimizer.zero_grad(set_to_none=True)
        inputs = target.generate_batch(rows, ones, ones).to_trainer_inputs()
        if partitions > 1:
            plan = trainer.build_peagle_plan(inputs["loss_mask"])
            for index in range(len(plan.units)):
                trainer(**inputs, peagle_segment=(plan, index)).loss.backward()
        else:
            trainer(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--partitions", type=int, default=1)
    arguments = parser.parse_args()
    ours = load_ours()
    step = peer_step(ours, ours.CASES[arguments.child], arguments.partitions)
    print(json.dumps(ours.measure(step, arguments.steps)))


if __name__ == "__main__":
    main()
