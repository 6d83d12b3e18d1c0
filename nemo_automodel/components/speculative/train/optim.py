# SPDX-License-Identifier: Apache-2.0
"""AdamW and its learning rate: linear warm-up, then a cosine down to `lr * min_lr_ratio`."""

from __future__ import annotations

import math

import torch

from nemo_automodel.config.schema import TrainConfig


def build_optimizer(model: torch.nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; vectors (norms) are not decayed."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.betas[0], train.betas[1]), fused=True)


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
