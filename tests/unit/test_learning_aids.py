# SPDX-License-Identifier: Apache-2.0
"""Muon, a start from the target's last layer, and the cache of the target's states: what they change and what not."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_train import losses_of, make_job

from nemo_automodel.components.datasets.encoded_rows import EncodedRow
from nemo_automodel.components.datasets.packing import PackedRow
from nemo_automodel.components.speculative.draft.from_target import start_from_layer
from nemo_automodel.components.speculative.target import Target
from nemo_automodel.components.speculative.train.optim import build_optimizer
from nemo_automodel.components.speculative.train.progress import RunReport
from nemo_automodel.components.speculative.train.run import build_run
from nemo_automodel.components.speculative.train.state_cache import StateCache
from nemo_automodel.config.schema import OptimizerKind, TrainConfig
from nemo_automodel.errors import ConfigError, TrainError

MUON = OptimizerKind.muon


class StopAfter:
    def __init__(self, steps: int | None) -> None:
        self.steps, self.loop = steps, None

    def enter_loop(self) -> None:
        pass

    def __call__(self) -> bool:
        return self.steps is not None and self.loop.position.step >= self.steps


def loop_of(job, *, resume=None, stop_after=None):
    stop = StopAfter(stop_after)
    with RunReport(job.run_dir, Console(file=io.StringIO())) as report:
        _, stop.loop = build_run(job, resume, report, stop)
    return stop.loop


def train_here(job, *, resume=None, stop_after=None):
    stop = StopAfter(stop_after)
    with RunReport(job.run_dir, Console(file=io.StringIO())) as report:
        _, stop.loop = build_run(job, resume, report, stop)
        return stop.loop.run()


def count_target_calls(loop) -> list[tuple[int, ...]]:
    """The shapes that the target is run on from now on."""
    shapes: list[tuple[int, ...]] = []
    target, run = loop.models.target, loop.models.target.states
    target.states = lambda ids, *rest: (shapes.append(tuple(ids.shape)), run(ids, *rest))[1]
    return shapes


def row(*ids: int) -> EncodedRow:
    return EncodedRow(1, np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))


def test_with_a_cache_the_target_runs_once_per_row_and_the_losses_are_the_same(tmp_path):
    plain = make_job(tmp_path, "plain", num_epochs=3)
    cached = make_job(tmp_path, "cached", num_epochs=3, cache_target_gb=1.0)
    train_here(plain)
    stop = StopAfter(None)
    with RunReport(cached.run_dir, Console(file=io.StringIO())) as report:
        _, stop.loop = build_run(cached, None, report, stop)
        shapes = count_target_calls(stop.loop)
        stop.loop.run()
    different = {row.input_ids.tobytes() for row in [*stop.loop.rows, *stop.loop.held_out]}
    assert len(shapes) == len(different) and {shape[0] for shape in shapes} == {1}  # in three epochs
    assert losses_of(cached) == pytest.approx(losses_of(plain), rel=1e-5)


def test_a_resumed_run_with_a_cache_goes_on_bit_for_bit(tmp_path):
    settings = {"num_epochs": 2, "cache_target_gb": 1.0, "optimizer": MUON}
    whole, parts = make_job(tmp_path, "whole", **settings), make_job(tmp_path, "parts", **settings)
    train_here(whole)
    first = train_here(parts, stop_after=11)  # within the second epoch, when all rows are in memory
    train_here(parts, resume=first.checkpoint)
    assert losses_of(parts) == losses_of(whole)


def test_the_cache_keeps_to_its_limit_and_knows_packed_lines_from_plain_ones(tmp_path):
    job = make_job(tmp_path, "run")
    target = Target.load(job.target.path, aux_layer_ids=(1, 2, 3), dtype=torch.float32, device="cpu")
    token = 4 * 32 * 4  # bytes of one token's states
    cache = StateCache(target, 6 * token / 1e9)
    first, second = row(5, 6, 7, 8), row(9, 10, 11)
    states = cache.states([second, first])
    assert states.aux.shape == (2, 4, 96) and states.last.shape == (2, 4, 32) and not states.last[0, 3].any()
    assert cache.bytes == 3 * token  # the second line no longer fitted
    alone = target.states(torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.int64))
    assert torch.equal(states.aux[1], alone.aux[0]) and torch.equal(states.last[1], alone.last[0])
    whole = StateCache(target, 1.0)
    line = PackedRow(first.input_ids, first.loss_mask, np.array([0, 2]))
    apart, together = whole.states([line]).last[0], whole.states([first]).last[0]
    assert torch.allclose(apart[:2], together[:2], atol=1e-5) and not torch.allclose(apart[2:], together[2:], atol=1e-2)


def test_muon_takes_the_matrices_and_learns(tmp_path):
    job = make_job(tmp_path, "run", num_epochs=4, optimizer=MUON, lr=2e-2)
    loop = loop_of(job)
    names = {id(p): name for name, p in loop.models.draft.named_parameters()}
    muon = {names[id(p)] for p in loop.optimizer.parts[0].param_groups[0]["params"]}
    assert muon == {name for name in names.values() if "_proj." in name or name == "model.fc.weight"}
    others = {names[id(p)] for group in loop.optimizer.parts[1].param_groups for p in group["params"]}
    trained = {name for name, p in loop.models.draft.named_parameters() if p.requires_grad}
    assert muon | others == trained and not muon & others
    train_here(job)
    losses = losses_of(job)
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8])


def test_the_learning_rate_reaches_both_parts_also_after_a_resume():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = build_optimizer(net, TrainConfig(optimizer=MUON))
    sum(p.sum() for p in net.parameters()).backward()
    optimizer.step()
    other = build_optimizer(net, TrainConfig(optimizer=MUON))
    other.load_state_dict(optimizer.state_dict())
    for group in other.param_groups:
        group["lr"] = 0.0
    before = [p.clone() for p in net.parameters()]
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))


def test_another_optimizer_on_resume_is_refused(tmp_path):
    job = make_job(tmp_path, "run")
    end = train_here(job, stop_after=2)
    with pytest.raises(TrainError, match="optimizer adamw -> muon"):
        train_here(make_job(tmp_path, "run", optimizer=MUON), resume=end.checkpoint)


def test_a_draft_that_starts_from_the_target_has_its_last_layer(tmp_path):
    loop = loop_of(make_job(tmp_path, "run", draft={"init_from_target": True}))
    draft, target = loop.models.draft.model, loop.models.target
    layer, first = target.last_layer, draft.layers[0]
    assert torch.equal(first.mlp.up_proj.weight, layer.mlp.up_proj.weight)
    assert torch.equal(first.self_attn.k_proj.weight[:, 32:], layer.self_attn.k_proj.weight)
    assert torch.equal(first.hidden_norm.weight, layer.input_layernorm.weight)
    assert torch.equal(draft.norm.weight, target.model.model.norm.weight)
    deepest = draft.fc.weight[:, 64:]
    assert (deepest.diagonal().mean() - 1).abs() < 0.05 and draft.fc.weight.std() < 0.3


def test_a_target_of_another_kind_is_refused(tmp_path):
    loop = loop_of(make_job(tmp_path, "run"))
    with pytest.raises(ConfigError, match="draft.init_from_target"):
        start_from_layer(loop.models.draft, torch.nn.TransformerEncoderLayer(32, 2), torch.ones(32))
