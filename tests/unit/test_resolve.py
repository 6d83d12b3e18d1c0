# SPDX-License-Identifier: Apache-2.0
"""Finding the draft: every spelling of a checkpoint, and refusing what only looks like one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from drafts import draft_config, draft_tensors, write_draft, write_target
from safetensors.numpy import save_file

from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.target_facts import read_target, read_target_or_none
from nemo_automodel.components.speculative.serve.types import Layout
from nemo_automodel.errors import ResolveError
from nemo_automodel.files import is_path_like


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """outputs/run with two checkpoints; LATEST is the second."""
    run = tmp_path / "outputs" / "run"
    write_draft(run / "checkpoints" / "epoch_0_step_9" / "model")
    write_draft(run / "checkpoints" / "epoch_1_step_10" / "model")
    (run / "checkpoints" / "LATEST").symlink_to("epoch_1_step_10")
    return run


@pytest.mark.parametrize(
    "sub",
    ["", "/", "checkpoints", "checkpoints/LATEST", "checkpoints/LATEST/", "checkpoints/epoch_1_step_10"]
    + ["checkpoints/epoch_1_step_10/model", "checkpoints/epoch_1_step_10/model/config.json"],
)
def test_every_way_to_name_a_checkpoint(run: Path, sub: str) -> None:
    want = (run / "checkpoints" / "epoch_1_step_10" / "model").resolve()
    assert resolve(f"outputs/run/{sub}" if sub != "/" else "outputs/run/", run.parents[1]).model_dir == want
    assert resolve(f"{run}/{sub}", Path("/")).model_dir == want


def test_latest_as_text_and_no_latest_at_all(run: Path) -> None:
    latest = run / "checkpoints" / "LATEST"
    latest.unlink()
    assert resolve(str(run), Path.cwd()).model_dir.parent.name == "epoch_1_step_10"  # 10 after 9, not by spelling
    latest.write_text("epoch_0_step_9\n")
    assert resolve(str(run), Path.cwd()).model_dir.parent.name == "epoch_0_step_9"
    assert resolve(str(latest), Path.cwd()).model_dir.parent.name == "epoch_0_step_9"


@pytest.mark.parametrize("text", ["epoch_7", "../../elsewhere", "/etc", ".", ""])
def test_a_latest_that_leads_nowhere_or_away_is_refused(run: Path, text: str) -> None:
    (run / "checkpoints" / "LATEST").unlink()
    (run / "checkpoints" / "LATEST").write_text(text)
    with pytest.raises(ResolveError, match="LATEST"):
        resolve(str(run), Path.cwd())


def test_a_dangling_latest_names_its_target(run: Path) -> None:
    (run / "checkpoints" / "LATEST").unlink()
    (run / "checkpoints" / "LATEST").symlink_to("epoch_5_step_50")
    with pytest.raises(ResolveError, match="epoch_5_step_50, which is not there"):
        resolve(str(run), Path.cwd())


def test_home_and_consolidated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_draft(tmp_path / "run" / "model" / "consolidated")
    save_file({"x": np.zeros(1)}, tmp_path / "run" / "model" / "shard-00001-model-00001-of-00001.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/run", "~/run/model", "~/run/model/consolidated/"):
        assert resolve(path, Path("/")).model_dir.name == "consolidated"


def test_every_place_looked_in_is_listed(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    with pytest.raises(ResolveError) as caught:
        resolve(str(tmp_path / "run"), Path.cwd())
    text = str(caught.value)
    assert f"{tmp_path}/run/model: no config.json" in text and f"{tmp_path}/run/checkpoints" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "text", ["./a/b", "../a", "~/a", "/a/b", "a/b/c", "a\\b", "plain", "a/", "org/na me", ".hidden/x", "org/..", "-x/y"]
)
def test_path_like_text_is_never_looked_up_on_the_hub(text: str, tmp_path: Path) -> None:
    assert is_path_like(text)
    with pytest.raises(ResolveError, match="no such path"):
        resolve(text, tmp_path)


def test_a_hub_id_without_the_hub_is_said_plainly(tmp_path: Path) -> None:
    assert not is_path_like("some-org/some-draft")
    with pytest.raises(ResolveError, match="cannot be had from the Hub") as caught:
        resolve("some-org/some-draft", tmp_path)
    assert len(caught.value.found) < 250 and not caught.value.found.endswith(".")


def test_a_folder_of_the_user_is_no_organisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs").mkdir()
    (tmp_path / "elsewhere" / "some-org").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ResolveError, match="no such path"):
        resolve("outputs/typo", tmp_path)
    with pytest.raises(ResolveError, match="no folder"):
        read_target("outputs/typo", tmp_path)
    with pytest.raises(ResolveError):
        read_target_or_none("outputs/typo", tmp_path)
    with pytest.raises(ResolveError, match="cannot be had from the Hub"):  # a folder of the working directory is none
        resolve("some-org/some-draft", tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "d", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ResolveError, match="1 of 3 shards .* model-00002-of-00003"):
        resolve(str(folder), Path.cwd())


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_half_written_shard_is_named_as_such(tmp_path: Path, keep: int) -> None:
    folder = write_draft(tmp_path / "d", shards=2)
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ResolveError, match="model-00001-of-00002"):
        resolve(str(folder), Path.cwd())


def test_a_half_written_config_or_index_is_named_as_such(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "d", shards=2)
    index = folder / "model.safetensors.index.json"
    for file in (index, folder / "config.json"):
        whole = file.read_text()
        file.write_text(whole[:-9])
        with pytest.raises(ResolveError, match=f"{file.name}: not JSON.*half-written"):
            resolve(str(folder), Path.cwd())
        file.write_text(whole)
    assert len(resolve(str(folder), Path.cwd()).shards) == 2


@pytest.mark.parametrize("name", ["../d2/model.safetensors", "/etc/passwd", "..\\x.safetensors", "weights.bin"])
def test_an_index_leads_nowhere_outside_its_folder(tmp_path: Path, name: str) -> None:
    write_draft(tmp_path / "d2")
    folder = write_draft(tmp_path / "d", shards=2)
    index = folder / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    body["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(body))
    with pytest.raises(ResolveError, match="no safetensors file inside its folder"):
        resolve(str(folder), Path.cwd())


def test_leftovers_of_another_sharding_and_untold_files(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "d", shards=2)
    save_file(draft_tensors(), folder / "model-00001-of-00003.safetensors")
    assert len(resolve(str(folder), Path.cwd()).shards) == 2
    save_file(draft_tensors(), folder / "model.safetensors")
    with pytest.raises(ResolveError, match="holds both"):
        resolve(str(folder), Path.cwd())
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ResolveError, match="3 weight files .* no model.safetensors.index.json"):
        resolve(str(folder), Path.cwd())


def test_numbered_files_without_an_index_are_a_whole_set_or_half_written(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "d", shards=2)
    (folder / "model.safetensors.index.json").unlink()
    assert {t.name for t in resolve(str(folder), Path.cwd()).tensors} == set(draft_tensors())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ResolveError, match="1 weight file .*half-written"):
        resolve(str(folder), Path.cwd())


def test_the_hub_s_cache_is_found_by_its_snapshot_and_by_its_repository(tmp_path: Path) -> None:
    """snapshots/<commit>/ holds links to blobs, as huggingface_hub lays them out."""
    repo = tmp_path / "models--me--draft"
    source, snapshot = write_draft(tmp_path / "d"), repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for file in source.iterdir():
        (repo / "blobs" / f"hash-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    for named in (snapshot, repo, snapshot / "model.safetensors"):
        assert resolve(str(named), Path.cwd()).model_dir == snapshot
    (repo / "snapshots" / "def").mkdir()
    with pytest.raises(ResolveError, match="2 snapshots and no refs/main"):
        resolve(str(repo), Path.cwd())
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc\n")
    assert resolve(str(repo), Path.cwd()).model_dir == snapshot


def test_a_trainer_s_own_state_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("training_args.bin", "optimizer.bin", "rng_state_0.pth"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ResolveError, match=r"no \*\.safetensors"):
        resolve(str(tmp_path), Path.cwd())


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").write_text("{}")
    (tmp_path / "d" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ResolveError, match="pytorch_model.bin.*serve_vllm convert --draft"):
        resolve(str(tmp_path / "d"), Path.cwd())


def test_unconsolidated_nemo_shards_are_explained(tmp_path: Path) -> None:
    (tmp_path / "e" / "model" / ".hf_metadata").mkdir(parents=True)
    save_file({"x": np.zeros(1)}, tmp_path / "e" / "model" / "shard-00001-model-00001-of-00001.safetensors")
    with pytest.raises(ResolveError, match="save_consolidated"):
        resolve(str(tmp_path / "e"), Path.cwd())


def test_layouts_are_told_by_their_files(tmp_path: Path) -> None:
    midlayer = {k.replace("model.", "").replace("layers.0.", "midlayer."): v for k, v in draft_tensors().items()}
    cases = {
        Layout.nemo: write_draft(tmp_path / "nemo"),
        Layout.midlayer: write_draft(
            tmp_path / "mid", draft_config(architectures=["LlamaForCausalLMEagle3"]), midlayer
        ),
        Layout.speculators: write_draft(
            tmp_path / "spec", {"speculators_model_type": "peagle"}, draft_tensors(prefix="")
        ),
        Layout.vllm: write_draft(
            tmp_path / "vllm", draft_config(architectures=["LlamaForCausalLMEagle3"]), draft_tensors(prefix="")
        ),
    }
    for layout, folder in cases.items():
        assert resolve(str(folder), Path.cwd()).layout is layout


def test_peers_resolve(peers: Path) -> None:
    found = {
        name: resolve(str(peers / name), Path.cwd()) for name in ("nemo_peagle", "nemo_eagle3", "speculators_peagle")
    }
    assert [draft.layout for draft in found.values()] == [Layout.nemo, Layout.nemo, Layout.speculators]
    assert [draft.model_dir.name for draft in found.values()] == ["consolidated", "consolidated", "speculators_peagle"]


def test_odd_names(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "a=b, ü #1 (x)" / "model")
    assert resolve(str(folder.parent) + os.sep, Path.cwd()).model_dir == folder.resolve()


def test_target_facts_flatten_a_nested_text_config(tmp_path: Path) -> None:
    write_target(tmp_path / "plain")
    plain = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "vl").mkdir()
    (tmp_path / "vl" / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": plain}))
    facts = read_target("vl", tmp_path)
    assert (facts.num_hidden_layers, facts.vocab_size, facts.model_type) == (8, 64, "qwen3")


def test_a_bad_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResolveError, match="no folder"):
        read_target("./nowhere", tmp_path)
    write_target(tmp_path / "t", hidden_size=None)
    with pytest.raises(ResolveError, match="hidden_size"):
        read_target("t", tmp_path)


def test_printing_goes_on_without_an_unreachable_hub_target(tmp_path: Path) -> None:
    facts, warning = read_target_or_none("some-org/some-model", tmp_path)
    assert facts is None and "skipped" in warning
    with pytest.raises(ResolveError):
        read_target_or_none("./nowhere", tmp_path)
