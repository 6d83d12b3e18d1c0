# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at any moment of an export: what is left is either whole or built again, and its rubbish is cleaned."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from drafts import H, draft_config, draft_tensors, write_draft, write_target

from nemo_automodel.components.speculative.serve.export import export, plan_export, reusable_digest
from nemo_automodel.components.speculative.serve.export_plan import ExportPlan
from nemo_automodel.components.speculative.serve.fixup import plan_fixups
from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.target_facts import read_target
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import release_for
from nemo_automodel.files import read_safetensors_header

KILLS = 50
VOCAB = 8192
EVENTS = frozenset(("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "tempfile.mkdtemp"))


@pytest.fixture
def plans(tmp_path: Path) -> tuple[ExportPlan, ExportPlan]:
    """Two exports of one draft of three shards (1 MB) that differ in an option, so that each replaces the other."""
    random_ = np.random.default_rng(1)
    tensors = draft_tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = random_.standard_normal((VOCAB, H)).astype("float32")
    tensors |= {"d2t": np.zeros(VOCAB, "int64"), "t2d": np.ones(VOCAB, bool)}  # left out: a full vocabulary
    config = draft_config(vocab_size=VOCAB, draft_vocab_size=VOCAB)
    draft = write_draft(tmp_path / "d", config, tensors, shards=3)
    target = write_target(tmp_path / "target", vocab_size=VOCAB)
    return _plan(draft, target, 256), _plan(draft, target, 4096)


def _plan(draft: Path, target: Path, max_model_len: int) -> ExportPlan:
    env = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    spec = ServeSpec(checkpoint=str(draft), target=str(target), max_model_len=max_model_len, env=env)
    resolved = resolve(spec.checkpoint, draft)
    return plan_export(resolved, plan_fixups(resolved, release_for("0.32"), read_target(spec.target), spec), spec)


def _digests(file: Path) -> dict[str, str]:
    header, data = read_safetensors_header(file), file.read_bytes()
    return {
        t.name.removeprefix("model."): hashlib.sha256(data[header.data_start :][t.begin : t.end]).hexdigest()
        for t in header.tensors
    }


def _assert_whole(plan: ExportPlan) -> None:
    """Every tensor of the export has its source's bytes, and the config is the plan's."""
    source: dict[str, str] = {}
    for shard in plan.model_dir.glob("*.safetensors"):
        source |= _digests(shard)
    written = _digests(plan.dest / "model.safetensors")
    assert written == {name: source[name] for name in written} and len(written) == len(source) - 2  # d2t, t2d
    assert (plan.dest / "config.json").read_text().count(f'"max_position_embeddings": {_length(plan)}') == 1


def _length(plan: ExportPlan) -> int:
    return plan.config["max_position_embeddings"]


def _killed_child(work: Callable[[], None], delay_s: float | None) -> bool:
    """Run `work` in a forked child; after `delay_s` it is killed. Whether a kill ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    if delay_s is not None:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def _assert_sound(plans: tuple[ExportPlan, ExportPlan]) -> str:
    """Whatever a later run would reuse is whole; "a", "b" or "none" says what that is."""
    fresh = [plan for plan in plans if reusable_digest(plan) is not None]
    assert len(fresh) < 2
    for plan in fresh:
        _assert_whole(plan)
    return "ab"[plans.index(fresh[0])] if fresh else "none"


def _assert_next_run_mends(plans: tuple[ExportPlan, ExportPlan], which: int) -> None:
    done = export(plans[which])
    _assert_whole(plans[which])
    assert export(plans[which]) == type(done)(done.dir, True, done.digest)
    names = {file.name for file in plans[0].model_dir.iterdir() if not file.name.endswith((".safetensors", ".json"))}
    assert names == {"vllm_export", ".vllm_export.lock"}
    assert {file.name for file in done.dir.iterdir()} == {"config.json", "manifest.json", "model.safetensors"}


def test_killed_fifty_times_at_random(plans: tuple[ExportPlan, ExportPlan]) -> None:
    begin = time.monotonic()
    export(plans[0])
    export(plans[1])
    span = time.monotonic() - begin
    chance, seen = random.Random(7), Counter[str]()

    def work() -> None:
        while True:
            export(plans[0])
            export(plans[1])

    for turn in range(KILLS):
        assert _killed_child(work, chance.uniform(0, 2 * span))
        seen[_assert_sound(plans)] += 1
        if turn % 5 == 4:
            _assert_next_run_mends(plans, turn % 2)
    assert seen["a"] and seen["b"], f"the kills all fell in one place: {seen}"


@pytest.mark.parametrize("start", ["nothing there", "another there", "touched"])
def test_killed_at_every_step(plans: tuple[ExportPlan, ExportPlan], start: str) -> None:
    """Before the first, the second, ... file operation; until the export gets through."""
    states, step = Counter[str](), 0
    while True:
        _prepare(plans, start)
        step += 1
        if not _killed_child(lambda at=step: _export_until(plans[1], at), None):
            break
        states[_assert_sound(plans)] += 1
    assert _assert_sound(plans) == "b" and step > 10
    if start == "another there":
        assert states["a"] and states["b"] and states["none"] <= 2, states  # none: between the two renames
    _assert_next_run_mends(plans, 1)


def _prepare(plans: tuple[ExportPlan, ExportPlan], start: str) -> None:
    if start == "nothing there":
        _assert_next_run_mends(plans, 1)
        for file in plans[0].dest.iterdir():
            file.unlink()
        plans[0].dest.rmdir()
        return
    _assert_next_run_mends(plans, 0 if start == "another there" else 1)
    if start == "touched":  # the manifest alone is written
        shard = next(plans[0].model_dir.glob("*.safetensors"))
        os.utime(shard, ns=(1, time.time_ns()))


def _export_until(plan: ExportPlan, step: int) -> None:
    left = [step]

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event in EVENTS:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    export(plan)
