# SPDX-License-Identifier: Apache-2.0
"""The export: the source's bytes under vLLM's names, built once, rebuilt when something changed, never half there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafts import HEAD, HEADS, KV, V, draft_config, draft_tensors, write_draft, write_target
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from nemo_automodel.components.speculative.serve import export as export_module
from nemo_automodel.components.speculative.serve.export import export, plan_export
from nemo_automodel.components.speculative.serve.export_plan import ExportPlan
from nemo_automodel.components.speculative.serve.fixup import plan_fixups
from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.target_facts import read_target
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import release_for
from nemo_automodel.errors import ExportError


def plan_for(draft: Path, **spec: Any) -> ExportPlan:
    target_dir = draft.parent / "a-target"
    target = read_target(str(write_target(target_dir)))
    options = ServeSpec(checkpoint=str(draft), target=str(target_dir), **spec)
    resolved = resolve(options.checkpoint, Path.cwd())
    return plan_export(resolved, plan_fixups(resolved, release_for("0.32"), target, options), options)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(folder)): f.read_bytes()
        for f in folder.rglob("*")
        if f.is_file() and "vllm_export" not in str(f)
    }


def assert_same_bytes(draft: Path, dest: Path, *, left_out: tuple[str, ...] = ()) -> None:
    source: dict[str, Any] = {}
    for shard in draft.glob("*.safetensors"):
        source |= load_file(shard)
    written = load_file(dest / "model.safetensors")
    assert {name.removeprefix("model.") for name in source} - set(left_out) == set(written)
    for name, value in source.items():
        if name not in left_out:
            new = written[name.removeprefix("model.")]
            assert new.dtype == value.dtype and new.tobytes() == value.tobytes()


def leftovers(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir() if f.name.endswith(".tmp"))


@pytest.mark.parametrize("shards", [1, 3])
def test_bytes_are_the_source_s_under_new_names(tmp_path: Path, shards: int) -> None:
    draft = write_draft(tmp_path / "d", shards=shards)
    before = snapshot(draft)
    done = export(plan_for(draft))
    assert done.dir == draft / "vllm_export" and not done.reused
    assert_same_bytes(draft, done.dir)
    assert json.loads((done.dir / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    assert snapshot(draft) == before and leftovers(draft) == []
    with safe_open(done.dir / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_that_are_left_out_cost_no_space(tmp_path: Path) -> None:
    maps = {"d2t": np.zeros(V, "int64"), "t2d": np.ones(V, bool)}
    draft = write_draft(tmp_path / "d", None, draft_tensors() | maps)
    done = export(plan_for(draft))
    assert_same_bytes(draft, done.dir, left_out=("d2t", "t2d"))
    assert (done.dir / "model.safetensors").stat().st_size < (draft / "model.safetensors").stat().st_size - V * 8


def test_a_second_run_reuses_and_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = write_draft(tmp_path / "d")
    first = export(plan_for(draft))
    monkeypatch.setattr(export_module, "sha256_file", lambda path: pytest.fail("hashed without need"))
    second = export(plan_for(draft))
    assert second.reused and second.digest == first.digest


def touch_only(draft: Path) -> None:
    os.utime(draft / "model.safetensors", ns=(1, 1))


def rewrite_same(draft: Path) -> None:
    copy = draft / "copy"
    shutil.copyfile(draft / "model.safetensors", copy)
    os.replace(copy, draft / "model.safetensors")


def chmod(draft: Path) -> None:
    (draft / "model.safetensors").chmod(0o600)


@pytest.mark.parametrize("touch", [touch_only, rewrite_same, chmod])
def test_new_times_with_the_same_bytes_do_not_rebuild(tmp_path: Path, touch: Any) -> None:
    draft = write_draft(tmp_path / "d")
    first = export(plan_for(draft))
    touch(draft)
    second = export(plan_for(draft))
    assert second.reused and second.digest == first.digest


def flip_in_place(draft: Path, export_dir: Path) -> None:
    """One byte, with the old times put back: only ctime tells."""
    file = draft / "model.safetensors"
    stat = file.stat()
    with file.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last[0] ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def restore_older(draft: Path, export_dir: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2
    save_file(tensors, draft / "model.safetensors")
    os.utime(draft / "model.safetensors", ns=(10**18, 10**18))  # older than the export


def change_config(draft: Path, export_dir: Path) -> None:
    (draft / "config.json").write_text(json.dumps(draft_config(norm_before_residual=True)))


def lose_manifest(draft: Path, export_dir: Path) -> None:
    (export_dir / "manifest.json").unlink()


def cut_weights(draft: Path, export_dir: Path) -> None:
    os.truncate(export_dir / "model.safetensors", 100)


def edit_exported_config(draft: Path, export_dir: Path) -> None:
    (export_dir / "config.json").write_text("{}")


@pytest.mark.parametrize(
    "change", [flip_in_place, restore_older, change_config, lose_manifest, cut_weights, edit_exported_config]
)
def test_what_changed_is_built_again(tmp_path: Path, change: Any) -> None:
    draft = write_draft(tmp_path / "d")
    done = export(plan_for(draft))
    change(draft, done.dir)
    again = export(plan_for(draft))
    assert not again.reused
    assert_same_bytes(draft, again.dir)
    assert json.loads((again.dir / "config.json").read_text())["pard_token"] == 3
    assert export(plan_for(draft)).reused and leftovers(draft) == []


LONG = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}  # vLLM's own way to serve beyond the target's length


def test_other_options_build_again(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d")
    export(plan_for(draft))
    done = export(plan_for(draft, max_model_len=4096, env=LONG))
    assert not done.reused and json.loads((done.dir / "config.json").read_text())["max_position_embeddings"] == 4096
    assert export(plan_for(draft, max_model_len=4096, env=LONG, port=1234, num_speculative_tokens=2)).reused


def test_a_copied_run_is_not_built_again(tmp_path: Path) -> None:
    export(plan_for(write_draft(tmp_path / "d")))
    shutil.copytree(tmp_path / "d", tmp_path / "copy")
    assert export(plan_for(tmp_path / "copy")).reused


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = write_draft(tmp_path / "d")
    before = snapshot(draft)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(ExportError, match=r"\d+ bytes needed, \d+ free.*serve.export_dir"):
        export(plan_for(draft))
    assert not (draft / "vllm_export").exists() and leftovers(draft) == []
    assert {k: v for k, v in snapshot(draft).items() if not k.endswith(".lock")} == before


def test_a_failure_keeps_the_export_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = write_draft(tmp_path / "d")
    done = export(plan_for(draft))
    before = (done.dir / "model.safetensors").read_bytes()

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "copy_file_range", fail)
    with pytest.raises(ExportError, match="Input/output error"):
        export(plan_for(draft, max_model_len=4096, env=LONG))
    assert (done.dir / "model.safetensors").read_bytes() == before


def test_without_copy_file_range_the_bytes_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def across(*args: Any) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", across)
    draft = write_draft(tmp_path / "d", shards=2)
    assert_same_bytes(draft, export(plan_for(draft)).dir)


def test_killed_halfway_never_looks_fresh(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d")
    target = write_target(tmp_path / "a-target")
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from nemo_automodel.components.speculative.serve import export\n"
        "from nemo_automodel.components.speculative.serve_vllm import main\n"
        "export.fsync_dir = lambda path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(['--draft', sys.argv[1], '--target', sys.argv[2], '--export-only'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(draft), str(target)], check=False, timeout=120)
    assert done.returncode == -9
    assert leftovers(draft) and not (draft / "vllm_export").exists()
    assert not export(plan_for(draft)).reused
    assert leftovers(draft) == []
    assert_same_bytes(draft, draft / "vllm_export")


def test_two_at_once_build_once(tmp_path: Path) -> None:
    plan = plan_for(write_draft(tmp_path / "d"))
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(export(plan).reused)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True, True, True]


def test_a_read_only_checkpoint_goes_to_the_cache_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = write_draft(tmp_path / "store" / "model")
    draft.chmod(0o555)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan = plan_for(draft)
    assert "read-only" in plan.notes[0] and str(tmp_path / "cache") in plan.notes[0]
    done = export(plan)
    assert_same_bytes(draft, done.dir)
    assert sorted(f.name for f in draft.iterdir()) == ["config.json", "model.safetensors"]
    assert export(plan_for(draft)).reused
    draft.chmod(0o755)


def test_links_into_a_store_are_exported_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = write_draft(tmp_path / "snapshots" / "abc")
    (draft / "model.safetensors").rename(tmp_path / "blob")
    (draft / "model.safetensors").symlink_to(tmp_path / "blob")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan = plan_for(draft)
    assert "store" in plan.notes[0]
    assert_same_bytes(draft, export(plan).dir)
    assert sorted(f.name for f in draft.iterdir()) == ["config.json", "model.safetensors"]


def test_export_dir_keeps_checkpoints_apart(tmp_path: Path) -> None:
    for step in (1, 2):
        write_draft(tmp_path / f"run{step}" / "epoch_1" / "model")
    dests = {
        export(plan_for(tmp_path / f"run{i}" / "epoch_1" / "model", export_dir=str(tmp_path / "out"))).dir
        for i in (1, 2)
    }
    assert len(dests) == 2 and all(
        dest.parent == tmp_path / "out" and dest.name.startswith("epoch_1-") for dest in dests
    )


def test_a_folder_of_another_tool_is_left_alone(tmp_path: Path) -> None:
    """NeMo Automodel's launcher writes a `vllm_export/`, too, with the tokenizer's files in it."""
    draft = write_draft(tmp_path / "d")
    (draft / "vllm_export").mkdir()
    (draft / "vllm_export" / "tokenizer.json").write_text("theirs")
    plan = plan_for(draft)
    assert "another tool" in plan.notes[0] and str(plan.dest) in plan.notes[0]
    assert_same_bytes(draft, export(plan).dir)
    assert (draft / "vllm_export" / "tokenizer.json").read_text() == "theirs"
    assert export(plan_for(draft)).reused


def test_a_folder_of_the_user_is_no_place_for_an_export(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d")
    dest = plan_for(draft, export_dir=str(tmp_path / "out")).dest
    dest.mkdir(parents=True)
    (dest / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="notes.txt.*left alone"):
        export(plan_for(draft, export_dir=str(tmp_path / "out")))
    assert (dest / "notes.txt").read_text() == "mine"


def test_odd_names(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "lr=1e-4, ü (x) #2")
    assert_same_bytes(draft, export(plan_for(draft)).dir)


def test_a_checkpoint_that_changes_meanwhile_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = write_draft(tmp_path / "d")
    write = export_module.write_weights

    def change(plan: ExportPlan, path: Path) -> None:
        write(plan, path)
        os.utime(draft / "model.safetensors")

    monkeypatch.setattr(export_module, "write_weights", change)
    with pytest.raises(ExportError, match="changed while it was exported"):
        export(plan_for(draft))
    assert not (draft / "vllm_export").exists()


def test_an_export_can_be_exported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody pastes the export's folder as the draft: nothing is written into it, so it stays an export of ours."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draft = write_draft(tmp_path / "d")
    first = export(plan_for(draft)).dir
    plan = plan_for(first)
    second = export(plan).dir
    assert "is an export itself" in plan.notes[0] and second.is_relative_to(tmp_path / "cache")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert len(list(first.iterdir())) == 3 and export(plan_for(draft)).reused


@pytest.mark.parametrize("name", ["nemo_peagle", "nemo_eagle3", "speculators_peagle"])
def test_peers(peers: Path, tmp_path: Path, name: str) -> None:
    spec = ServeSpec(checkpoint=str(peers / name), target=str(peers / "target"), export_dir=str(tmp_path))
    resolved = resolve(spec.checkpoint, Path.cwd())
    fixups = plan_fixups(resolved, release_for("0.32"), read_target(spec.target), spec)
    done = export(plan_export(resolved, fixups, spec))
    with safe_open(done.dir / "model.safetensors", "pt") as new, safe_open(resolved.shards[0], "pt") as old:
        assert set(new.keys()) == {name.removeprefix("model.") for name in old.keys()}
        for source, renamed in fixups.renames.items():
            assert old.get_tensor(source).equal(new.get_tensor(renamed))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_tied_head_is_the_embedding_twice(tmp_path: Path, shards: int) -> None:
    tensors = {name: value for name, value in draft_tensors().items() if name != "lm_head.weight"}
    draft = write_draft(tmp_path / "d", draft_config(tie_word_embeddings=True), tensors, shards)
    done = export(plan_for(draft))
    written = load_file(done.dir / "model.safetensors")
    assert set(written) == {name.removeprefix("model.") for name in tensors} | {"lm_head.weight"}
    assert np.array_equal(written["lm_head.weight"], tensors["model.embed_tokens.weight"])
    for name, value in tensors.items():
        assert np.array_equal(written[name.removeprefix("model.")], value)
    assert export(plan_for(draft)).reused


@pytest.mark.parametrize(("shards", "dtype"), [(1, "float32"), (3, "float16")])
def test_an_output_bias_of_zeros_is_added_where_the_draft_has_none(tmp_path: Path, shards: int, dtype: str) -> None:
    """float16 is the narrowest kind here, so its zeros come near the file's end."""
    tensors = draft_tensors(layers=2)
    for i in range(2):
        stem = f"model.layers.{i}.self_attn."
        tensors[stem + "o_proj.weight"] = tensors[stem + "o_proj.weight"].astype(dtype)
        sizes = {"q": HEADS * HEAD, "k": KV * HEAD, "v": KV * HEAD}
        tensors |= {stem + f"{x}_proj.bias": np.ones(size, "float32") for x, size in sizes.items()}
    draft = write_draft(tmp_path / "d", draft_config(attention_bias=True), tensors, shards=shards)
    done = export(plan_for(draft))
    written = load_file(done.dir / "model.safetensors")
    made = {f"layers.{i}.self_attn.o_proj.bias" for i in range(2)}
    assert set(written) - {name.removeprefix("model.") for name in tensors} == made
    assert all(written[name].dtype == dtype and not written[name].any() for name in made)
    for name, value in tensors.items():
        assert written[name.removeprefix("model.")].tobytes() == value.tobytes()
    assert export(plan_for(draft)).reused
