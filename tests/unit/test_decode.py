# SPDX-License-Identifier: Apache-2.0
"""Decoding while training: it says what the reference decoder says of the saved checkpoint, and changes nothing."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console
from test_train_loop import train_here
from tiny_train import losses_of, make_job, metrics_of

from nemo_automodel.components.speculative.bench.reference import Job, predict_counts
from nemo_automodel.components.speculative.draft.io import load_draft
from nemo_automodel.components.speculative.train.decode import DecodeCheck
from nemo_automodel.components.speculative.train.retention import best_of
from nemo_automodel.components.speculative.train.summary import describe_end
from nemo_automodel.components.speculative.train.trackers import scalars
from nemo_automodel.config.schema import DraftKind, Precision
from nemo_automodel.errors import ConfigError

SHORT = {"decode_max_new_tokens": 24}


def decoded(job):
    return [(line["step"], line["decode"]) for line in metrics_of(job) if "decode" in line]


@pytest.mark.parametrize("draft", [
    {}, {"draft_vocab_size": 24}, {"kind": DraftKind.eagle3, "ttt_steps": 3, "norm_output": True},
    {"bf16": True},
], ids=["peagle", "reduced", "eagle3", "bf16"])  # fmt: skip
def test_it_counts_what_the_reference_decoder_counts_for_the_checkpoint(tmp_path, draft):
    bf16 = draft.pop("bf16", False)
    precision = Precision.bf16 if bf16 else Precision.fp32
    job = make_job(tmp_path, "run", draft=draft, num_epochs=3, precision=precision, lr=1e-2, **SHORT)
    checkpoint = train_here(job).checkpoint
    step, figures = decoded(job)[-1]
    assert (step, figures["prompts"], figures["k"]) == (24, 4, 3)
    wanted = predict_counts(Job(
        target=job.target.path, draft=str(checkpoint / "model"), prompts=job.data.validation, num_prompts=16,
        max_new_tokens=24, num_speculative_tokens=3, dtype="bfloat16" if bf16 else "float32",
    ))  # fmt: skip
    assert figures["num_drafts"] == wanted.num_drafts and figures["output_tokens"] == wanted.output_tokens
    assert figures["accepted_per_position"] == list(wanted.accepted_per_position)
    assert figures["acceptance_length"] == pytest.approx(
        1 + sum(wanted.accepted_per_position) / wanted.num_drafts, abs=1e-4
    )
    assert wanted.accepted_per_position[0] > 0
    assert json.loads((checkpoint / "decode.json").read_text()) == figures


def test_training_goes_the_same_way_with_and_without_and_resumed(tmp_path):
    settings = {"max_steps": 6, "decode_every_steps": 2, **SHORT}
    straight, without = make_job(tmp_path, "a", **settings), make_job(tmp_path, "b", max_steps=6, decode_prompts=0)
    end, other = train_here(straight), train_here(without)
    assert losses_of(straight) == losses_of(without) and not decoded(without)
    one, two = (load_draft(e.checkpoint / "model")[0].state_dict().values() for e in (end, other))
    assert all(torch.equal(a, b) for a, b in zip(one, two))
    first, second = make_job(tmp_path, "c", **settings), make_job(tmp_path, "d", **settings)
    train_here(second, resume=train_here(first, stop_after=3).checkpoint)

    def counts(*jobs):
        return [(step, found["accepted_per_position"]) for job in jobs for step, found in decoded(job)]

    assert counts(first, second) == counts(straight) and [step for step, _ in counts(straight)] == [2, 4, 6]
    assert not any(line.get("decode") and "validation" in line for line in metrics_of(straight))


def test_what_cannot_be_decoded_is_said_and_training_goes_on(tmp_path, monkeypatch):
    def said(run, **settings):
        out = io.StringIO()
        train_here(make_job(tmp_path, run, max_steps=1, **settings), console=Console(file=out))
        return out.getvalue()

    assert "4 prompts of" in said("fits", **SHORT) and "1 decoded  acceptance length" in said("fits", **SHORT)
    assert "no prompt of" in said("long", decode_max_new_tokens=128)
    longest = said("some", decode_max_new_tokens=24, seq_length=31)
    assert "1 longer than 31 tokens are left out" in longest and "decoded  acceptance" in longest

    def no_memory(_check):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(DecodeCheck, "figures", no_memory)
    assert "too little GPU memory to decode" in (out := said("full", **SHORT)) and "saved" in out
    penalty = tmp_path / "target" / "generation_config.json"
    penalty.write_text(json.dumps(json.loads(penalty.read_text()) | {"repetition_penalty": 1.1}))
    assert "nothing is decoded during training: the target's generation_config.json sets repetition" in said(
        "p", **SHORT
    )
    with pytest.raises(ConfigError, match="no prompts to decode") as caught:
        said("none", decode_every_steps=1, data={"validation": None})
    assert caught.value.where == "train.decode_every_steps"


def test_best_compares_like_with_like(tmp_path):
    def checkpoint(step, simulated, decoded=None, prompts=16, loss=1.0):
        folder = tmp_path / f"epoch_1_step_{step}"
        folder.mkdir()
        (folder / "validation.json").write_text(json.dumps({"acceptance_length": simulated, "loss": loss}))
        if decoded is not None:
            (folder / "decode.json").write_text(json.dumps({"acceptance_length": decoded, "prompts": prompts}))
        return folder

    assert best_of(tmp_path) is None
    first = checkpoint(900, 3.0)  # by another run of this folder, or before decoding was asked for
    assert best_of(tmp_path) == first
    second = checkpoint(1000, 2.0, decoded=2.9, prompts=8)
    assert best_of(tmp_path) == second
    third = checkpoint(1100, 2.5, decoded=2.4)
    assert best_of(tmp_path) == third  # the newest was decoded with 16 prompts, no other was
    checkpoint(1200, 2.8, decoded=2.2)
    assert best_of(tmp_path) == third
    lower = checkpoint(1300, 1.0, decoded=2.4, loss=0.5)
    assert best_of(tmp_path) == lower
    checkpoint(1400, 1.0)
    assert best_of(tmp_path) == first  # the newest was not decoded
    (tmp_path / "epoch_1_step_1400" / "decode.json").write_text("{")
    assert best_of(tmp_path) == first


def test_trackers_and_the_summary_know_it():
    figures = {"acceptance_length": 2.5, "acceptance_per_position": [0.9, 0.6], "num_drafts": 9,
               "accepted_per_position": [8, 5], "prompts": 16}  # fmt: skip
    assert dict(scalars({"step": 5, "epoch": 1, "decode": figures})) == {
        "decode/acceptance_length": 2.5, "decode/acceptance/position_0": 0.9, "decode/acceptance/position_1": 0.6,
        "decode/num_drafts": 9, "decode/prompts": 16,
    }  # fmt: skip
    told = describe_end(rows=1, supervised_tokens=9, source="a", epochs=1, num_depths=2, held_out="h.jsonl",
                        validation={"acceptance_length": 1.7}, decoded=figures)[1]  # fmt: skip
    assert "near 2.50" in told and "decoded greedily with the target on 16 prompts" in told and "tenths" not in told
