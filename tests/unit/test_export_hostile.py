# SPDX-License-Identifier: Apache-2.0
"""The export on file systems that are full, small, read-only, oddly named or shared, run as users run it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from drafts import draft_config, draft_tensors, write_draft, write_target
from safetensors.numpy import load_file

from nemo_automodel.components.speculative.serve import export as export_module
from nemo_automodel.components.speculative.serve.export_plan import ExportPlan, plan_export
from nemo_automodel.components.speculative.serve.fixup import plan_fixups
from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.target_facts import read_target
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import release_for
from nemo_automodel.components.speculative.serve_vllm import main

ODD_NAMES = ("lr=1e-4, k=v", "ü ñ 模型", "a b 'c' \"d\"", "x[1]*?{2}", "-dash", "#1 (copy)", "%2F$HOME`x`")


def words(draft: Path, *more: str) -> list[str]:
    target = write_target(draft.parent / "a target")
    return ["--draft", str(draft), "--target", str(target), "--vllm-version", "0.32", *more, "--export-only"]


def export_here(draft: Path, *more: str) -> int:
    return main(words(draft, *more))


def names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*")}


def assert_served_bytes(draft: Path, dest: Path) -> None:
    written = load_file(dest / "model.safetensors")
    source = {
        key.removeprefix("model."): value for f in draft.glob("*.safetensors") for key, value in load_file(f).items()
    }
    assert source.keys() == written.keys()
    assert all(np.array_equal(source[name], value) for name, value in written.items())


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_odd_name_is_exported_and_printed_ready_to_paste(tmp_path: Path, name: str, capsys) -> None:
    draft = write_draft(tmp_path / name / "model")
    assert export_here(draft) == 0
    assert_served_bytes(draft, draft / "vllm_export")
    assert capsys.readouterr().out.strip() == str(draft / "vllm_export")


def test_a_name_that_is_no_text_is_refused_in_one_line(tmp_path: Path, capsys) -> None:
    """A file system holds bytes; JSON, and so vLLM's own speculative config, holds text."""
    draft = write_draft(tmp_path / os.fsdecode(b"run\xff") / "model")
    for option in ("--export-only", "--print-only"):
        assert main([*words(draft)[:-1], option]) == 1
        said = capsys.readouterr().err
        assert "not UTF-8" in said and "run\\xff" in said and "Traceback" not in said


def limited(limit: int):
    def set_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return set_limit


def test_a_file_size_limit_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    """The kernel's own refusal in the middle of the copy, not a stand-in for it."""
    draft = write_draft(tmp_path / "d")
    before = names(tmp_path)
    argv = [sys.executable, "-m", "nemo_automodel.components.speculative.serve_vllm", *words(draft)]
    done = subprocess.run(argv, preexec_fn=limited(4096), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "files may not be that large" in done.stderr and "--export-dir" in done.stderr
    assert names(tmp_path) - before <= {"d/.vllm_export.lock", "a target", "a target/config.json"}


@pytest.fixture
def small_disk(tmp_path: Path):
    """A tmpfs of 64 KiB, less than the draft."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_named_and_another_folder_helps(tmp_path: Path, small_disk: Path, capsys) -> None:
    tensors = draft_tensors() | {"lm_head.weight": np.ones((4096, 16), "float32")}
    tensors["model.embed_tokens.weight"] = np.ones((4096, 16), "float32")
    draft = write_draft(tmp_path / "d", draft_config(vocab_size=4096, draft_vocab_size=4096), tensors)
    write_target(tmp_path / "a target", vocab_size=4096)
    target = ["--target", str(tmp_path / "a target"), "--draft", str(draft), "--vllm-version", "0.32", "--export-only"]
    assert main([*target, "--export-dir", str(small_disk / "out")]) == 1
    said = capsys.readouterr().err
    assert "No space left" in said and str(small_disk) in said and "--export-dir" in said
    assert not list(small_disk.rglob("*.safetensors")) and not list(small_disk.rglob("*.tmp"))
    assert main([*target, "--export-dir", str(tmp_path / "out")]) == 0  # across file systems is no matter either way


def test_from_another_file_system_the_bytes_are_the_same(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d")
    with_shm = Path("/dev/shm")
    if not os.access(with_shm, os.W_OK) or with_shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    place = with_shm / f"export-{os.getpid()}"
    try:
        assert export_here(draft, "--export-dir", str(place)) == 0
        (dest,) = [folder for folder in place.iterdir() if folder.is_dir()]
        assert_served_bytes(draft, dest)
    finally:
        subprocess.run(["rm", "-r", str(place)], check=True)


def test_a_draft_behind_a_link_is_exported_beside_its_files(tmp_path: Path, capsys) -> None:
    draft = write_draft(tmp_path / "store" / "epoch_3" / "model")
    (tmp_path / "best").symlink_to(tmp_path / "store" / "epoch_3")
    write_target(tmp_path / "a target")
    assert export_here(tmp_path / "best") == 0 and export_here(tmp_path / "best") == 0
    first, second = capsys.readouterr().out.split()
    assert first == second == str(draft / "vllm_export")
    assert_served_bytes(draft, draft / "vllm_export")


def test_a_link_that_is_turned_to_another_checkpoint_is_followed(tmp_path: Path, capsys) -> None:
    for step in (1, 2):
        write_draft(tmp_path / f"epoch_{step}" / "model")
    link = tmp_path / "LATEST"
    exported = []
    for step in (1, 2):
        link.unlink(missing_ok=True)
        link.symlink_to(f"epoch_{step}")
        assert export_here(link) == 0
        exported.append(capsys.readouterr().out.strip())
    assert exported == [str(tmp_path / f"epoch_{step}" / "model" / "vllm_export") for step in (1, 2)]


def test_another_set_of_shards_is_built_again(tmp_path: Path, capsys) -> None:
    """The same tensors in other files, the old shards still there; then a tensor moves to a shard of its own."""
    draft = write_draft(tmp_path / "d", shards=2)
    assert export_here(draft) == 0
    digest = json.loads((draft / "vllm_export" / "manifest.json").read_text())["digest"]
    write_draft(draft, None, draft_tensors() | {"lm_head.weight": np.ones((64, 16), "float16")}, shards=3)
    assert export_here(draft) == 0
    said = capsys.readouterr().err
    assert "written" in said and "reused" not in said
    manifest = json.loads((draft / "vllm_export" / "manifest.json").read_text())
    assert manifest["digest"] != digest
    assert [entry["name"] for entry in manifest["sources"]] == [
        "config.json", *(f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)),
    ]  # fmt: skip
    assert load_file(draft / "vllm_export" / "model.safetensors")["lm_head.weight"].min() == 1


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d")
    argv = [sys.executable, "-m", "nemo_automodel.components.speculative.serve_vllm", *words(draft)]
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert sorted("reused" in err for _, err in told) == [False, True]
    assert_served_bytes(draft, draft / "vllm_export")


def test_printing_never_writes_into_an_export(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d")
    assert export_here(draft) == 0
    os.utime(draft / "model.safetensors", ns=(1, 1))  # hashed again, and still the same
    manifest = draft / "vllm_export" / "manifest.json"
    before = (manifest.stat().st_ino, manifest.stat().st_mtime_ns)
    argv = words(draft)[:-1]
    assert main([*argv, "--print-only", "--port", "0"]) == 0
    assert (manifest.stat().st_ino, manifest.stat().st_mtime_ns) == before


def plan(draft: Path) -> ExportPlan:
    spec = ServeSpec(checkpoint=str(draft), target=str(write_target(draft.parent / "a target")))
    resolved = resolve(spec.checkpoint, draft.parent)
    return plan_export(resolved, plan_fixups(resolved, release_for("0.32"), read_target(spec.target), spec), spec)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_one_shard_is_taken_whole_so_that_a_file_system_can_share_it(tmp_path: Path, prefix: str) -> None:
    """Reflinks want whole blocks from the start of the file to its end; a longer header would shift all of them."""
    draft = write_draft(tmp_path / "d", None, draft_tensors(prefix=prefix))
    (segment,) = plan(draft).segments
    size = (draft / "model.safetensors").stat().st_size
    assert (segment.begin, segment.dest, segment.length) == (0, 0, size)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_file_system_that_shares_is_asked_to(tmp_path: Path, prefix: str, monkeypatch) -> None:
    """A stand-in for XFS or btrfs: sharing needs no room, so a disk without any is no matter."""
    draft = write_draft(tmp_path / "d", None, draft_tensors(prefix=prefix))
    asked = []

    def share(out: int, request: int, source: int) -> int:
        asked.append(request)
        os.sendfile(out, source, 0, os.fstat(source).st_size)
        return 0

    monkeypatch.setattr(export_module.fcntl, "ioctl", share)
    monkeypatch.setattr(export_module, "_copy", lambda *args: pytest.fail("copied all the same"))
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda place: pytest.fail("room was asked for"))
    assert export_here(draft) == 0
    assert asked == [export_module.FICLONE]
    assert_served_bytes(draft, draft / "vllm_export")


def test_a_draft_in_vllms_form_that_is_saved_again_in_place_is_noticed(tmp_path: Path) -> None:
    """Its export shares no file with it: what is being served does not change under the server, and is rebuilt."""
    draft = write_draft(tmp_path / "d", None, draft_tensors(prefix=""))
    assert export_here(draft) == 0
    weights = draft / "vllm_export" / "model.safetensors"
    before = weights.read_bytes()
    assert weights.stat().st_ino != (draft / "model.safetensors").stat().st_ino
    with (draft / "model.safetensors").open("r+b") as file:  # same inode, same size
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x01\x02\x03")
    assert weights.read_bytes() == before
    assert export_here(draft) == 0
    assert weights.read_bytes() != before
    assert_served_bytes(draft, draft / "vllm_export")
