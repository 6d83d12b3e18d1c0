# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 along the whole road but the server: it learns, resumes, and its checkpoint is planned and exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train_loop import train_here
from tiny_train import losses_of, make_job

from nemo_automodel.components.speculative.draft.eagle3 import Eagle3Draft
from nemo_automodel.components.speculative.draft.io import load_draft
from nemo_automodel.components.speculative.serve.fixup import plan_fixups
from nemo_automodel.components.speculative.serve.forecast import print_forecast
from nemo_automodel.components.speculative.serve.pipeline import run_export
from nemo_automodel.components.speculative.serve.preflight import preflight
from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.target_facts import read_target
from nemo_automodel.components.speculative.serve.types import Engine, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import release_for
from nemo_automodel.config.schema import DraftConfig, DraftKind, TrainConfig
from nemo_automodel.errors import TrainError, UserError

ALL = {"kind": DraftKind.eagle3, "ttt_steps": 3, "num_layers": 2, "fc_norm": True, "norm_output": True,
       "draft_vocab_size": 40}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 epochs with all options."""
    root = tmp_path_factory.mktemp("eagle3")
    job = make_job(root, "run", num_epochs=6, draft=ALL)
    end = train_here(job)
    losses = losses_of(job)
    assert end.finished and sum(losses[-8:]) < 0.7 * sum(losses[:8])
    assert len(end.validation["accuracy_per_depth"]) == 3
    return root


def spec_of(run: Path) -> ServeSpec:
    return ServeSpec(checkpoint=str(run / "run"), target=str(run / "target"))


def test_the_checkpoint_says_what_it_is_and_names_no_mask(run: Path) -> None:
    folder = next((run / "run/checkpoints").glob("epoch_6*")) / "model"
    draft, spec = load_draft(folder)
    assert isinstance(draft, Eagle3Draft) and (spec.num_depths, spec.mask_token_id) == (3, None)
    config = json.loads((folder / "config.json").read_text())
    assert (config["parallel_drafting"], config["ttt_steps"], config["ttt_loss_decay"]) == (False, 3, 0.8)
    assert config["fc_norm"] is config["norm_output"] is True
    assert not {"mask_token_id", "num_depths", "down_sample_ratio"} & config.keys()
    names = draft.state_dict().keys()
    assert {f"model.fc_norm.{i}.weight" for i in range(3)} < names and "mask_hidden" not in names


def test_it_resumes_bit_for_bit(run: Path, tmp_path: Path) -> None:
    whole, first, rest = (make_job(tmp_path, name, num_epochs=1, draft=ALL) for name in ("whole", "first", "rest"))
    train_here(whole)
    end = train_here(first, stop_after=3)
    train_here(rest, resume=end.checkpoint)
    assert losses_of(first) + losses_of(rest) == losses_of(whole)
    with pytest.raises(TrainError, match="norm_output True -> False"):
        train_here(make_job(tmp_path, "other", draft=ALL | {"norm_output": False}), resume=end.checkpoint)


def test_frozen_embeddings_stay_and_all_else_moves(tmp_path: Path) -> None:
    job = make_job(tmp_path, "run", max_steps=4, draft=ALL | {"freeze_embeddings": True})
    end = train_here(job)
    start = train_here(make_job(tmp_path, "start", max_steps=1, draft=ALL | {"freeze_embeddings": True}, lr=1e-12))
    after, before = (load_draft(e.checkpoint / "model")[0].state_dict() for e in (end, start))
    same = {name for name in after if torch.equal(after[name], before[name])}
    assert same == {"model.embed_tokens.weight", "model.layers.1.hidden_norm.weight", "d2t", "t2d"}


def test_serving_reads_kind_depth_and_options_from_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of(run)
    target, resolved = read_target(spec.target, run), resolve(spec.checkpoint, run)
    plan = plan_fixups(resolved, release_for("0.32"), target, spec)
    assert (plan.parallel_drafting, plan.num_speculative_tokens) == (False, 3)
    with pytest.raises(UserError, match="fc_norm is set.*norm_output is set"):
        plan_fixups(resolved, release_for("0.20"), target, spec)
    run_export(spec, base_dir=run)
    exported, _ = load_draft(Path(capsys.readouterr().out.strip()))
    trained, _ = load_draft(resolved.model_dir)
    assert all(torch.equal(t, trained.state_dict()[name]) for name, t in exported.state_dict().items())


def test_before_training_serving_is_told_the_kind(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = replace(spec_of(run), print_only=True, checkpoint=str(run / "none"))
    draft = DraftConfig(kind=DraftKind.eagle3, ttt_steps=5)
    preflight(spec, draft, TrainConfig(), base_dir=run)
    preflight(replace(spec, engine=Engine.sglang), draft, TrainConfig(), base_dir=run)
    print_forecast(spec, "train", draft, base_dir=run, run_dir=run / "forecast")
    line = capsys.readouterr().out
    assert '"num_speculative_tokens": 5' in line and "parallel_drafting" not in line
    with pytest.raises(UserError, match="fc_norm is set, which vLLM 0.20 ignores"):
        preflight(replace(spec, vllm_version="0.20"), replace(draft, fc_norm=True), TrainConfig(), base_dir=run)
