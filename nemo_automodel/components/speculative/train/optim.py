# SPDX-License-Identifier: Apache-2.0
"""AdamW or Muon, and the learning rate: linear warm-up, then a cosine down to `lr * min_lr_ratio`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import Parameter

from nemo_automodel.config.schema import OptimizerKind, TrainConfig

OUTER = ("model.embed_tokens.", "lm_head.")  # tables of tokens, whose rows are vectors


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside the network, AdamW for head, embeddings and vectors, at one learning rate.

    Muon orthogonalises the momentum of a matrix; scaled to the size of AdamW's updates (arXiv 2502.16982). Its cost per
    step does not grow with the batch.
    """

    def __init__(self, matrices: list[Parameter], adamw: torch.optim.AdamW, train: TrainConfig) -> None:
        muon = torch.optim.Muon(matrices, lr=train.lr, weight_decay=train.weight_decay, adjust_lr_fn="match_rms_adamw")
        self.parts = (muon, adamw)
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in zip(("muon", "adamw"), self.parts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, part in zip(("muon", "adamw"), self.parts):
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def build_optimizer(model: torch.nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, vectors (norms) not decayed; or Muon for the matrices of fc and layers."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inner = [p for name, p in trainable.items() if p.ndim == 2 and not name.startswith(OUTER)]
    muon = train.optimizer is OptimizerKind.muon
    matrices = [p for p in trainable.values() if p.ndim > 1 and not (muon and any(p is q for q in inner))]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": [p for p in trainable.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=train.lr, betas=(train.betas[0], train.betas[1]), fused=True)
    return MuonAdamW(inner, adamw, train) if muon else adamw


def lr_at(step: int, total_steps: int, train: TrainConfig) -> float:
    """The learning rate of optimiser step `step` (from 0). A pure function: nothing to save, nothing to drift."""
    warmup = round(train.warmup_ratio * total_steps)
    if step < warmup:
        return train.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * cosine)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
