# SPDX-License-Identifier: Apache-2.0
"""What happens around an export: a source that changes, another export, leftovers and manifests that are not ours."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drafts import draft_tensors, write_draft, write_target
from filelock import FileLock
from safetensors.numpy import save_file
from test_export import assert_same_bytes, plan_for

from nemo_automodel.components.speculative.serve import export as export_module
from nemo_automodel.components.speculative.serve import export_plan
from nemo_automodel.components.speculative.serve.export import export
from nemo_automodel.components.speculative.serve.export_plan import MANIFEST, WEIGHTS
from nemo_automodel.components.speculative.serve.fixup import plan_fixups
from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.target_facts import read_target
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import release_for
from nemo_automodel.errors import ExportError


def save_again(draft: Path) -> None:
    """The next checkpoint, written in place: other sizes, so other offsets."""
    save_file(draft_tensors(layers=2), draft / WEIGHTS)


def test_a_source_saved_between_reading_and_planning_is_refused(tmp_path: Path) -> None:
    draft, target = write_draft(tmp_path / "draft"), write_target(tmp_path / "target")
    resolved, spec = resolve(str(draft), tmp_path), ServeSpec(str(draft), str(target))
    fixups = plan_fixups(resolved, release_for("0.32"), read_target(str(target)), spec)
    save_again(draft)

    with pytest.raises(ExportError, match="changed while it was exported"):
        export_plan.plan_export(resolved, fixups, spec, tmp_path)


@pytest.mark.parametrize("size", ["other", "same"])
def test_a_source_saved_between_planning_and_copying_is_refused(tmp_path: Path, size: str) -> None:
    draft = write_draft(tmp_path / "draft")
    plan = plan_for(draft)
    if size == "other":
        save_again(draft)
    else:
        (draft / WEIGHTS).write_bytes((draft / WEIGHTS).read_bytes()[::-1])

    with pytest.raises(ExportError, match="changed"):
        export(plan)
    assert not plan.dest.exists()


def test_waiting_for_another_export_is_told(tmp_path: Path) -> None:
    plan = plan_for(write_draft(tmp_path / "draft"))
    other, told = FileLock(plan.dest.parent / f".{plan.dest.name}.lock", thread_local=False), list[str]()
    other.acquire()

    def say(line: str) -> None:
        told.append(line)
        threading.Timer(0.1, other.release).start()

    assert not export(plan, say).reused
    assert told == [f"another process is exporting to {plan.dest}: waiting for it"]


def test_a_file_system_without_locks_is_told_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lockless(FileLock):
        def acquire(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError(errno.ENOLCK, "No locks available")

    plan = plan_for(write_draft(tmp_path / "draft"))
    with monkeypatch.context() as patched:
        patched.setattr(export_module, "FileLock", Lockless)
        with pytest.raises(ExportError, match="on a local disk"):
            export(plan)
    done = export(plan)
    monkeypatch.setattr(export_module, "FileLock", Lockless)
    assert export(plan) == replace(done, reused=True)  # whole and right: nothing is to be written there


def test_a_file_system_that_tells_no_sizes_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FUSE without statfs answers with zeros."""
    plan = plan_for(write_draft(tmp_path / "draft"))
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda place: SimpleNamespace(total=0, used=0, free=0))
    assert_same_bytes(tmp_path / "draft", export(plan).dir)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_leftover_that_cannot_be_removed_stops_nothing(tmp_path: Path, kind: str) -> None:
    draft = write_draft(tmp_path / "draft")
    plan = plan_for(draft)
    leftover = plan.dest.parent / f".{plan.dest.name}.left.tmp"
    leftover.write_text("x") if kind == "file" else leftover.symlink_to(tmp_path)

    export(plan)
    assert_same_bytes(draft, plan.dest)
    assert tmp_path.is_dir()


@pytest.mark.parametrize("sources", [[1], {}, "x", None, [{"name": 3}]])
def test_a_manifest_of_another_shape_is_built_again(tmp_path: Path, sources: Any) -> None:
    plan = plan_for(write_draft(tmp_path / "draft"))
    export(plan)
    manifest = json.loads((plan.dest / MANIFEST).read_text())
    (plan.dest / MANIFEST).write_text(json.dumps(manifest | {"sources": sources}))

    assert not export(plan).reused


def test_the_folder_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    plan = plan_for(write_draft(tmp_path / "draft"))
    before = os.umask(0o002)
    try:
        export(plan)
    finally:
        os.umask(before)
    assert plan.dest.stat().st_mode & 0o777 == 0o775
