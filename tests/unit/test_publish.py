# SPDX-License-Identifier: Apache-2.0
"""The folder that is published: what vLLM reads in it, what the card says, and that nothing is uploaded unasked."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from drafts import draft_config, draft_tensors, write_draft, write_target
from safetensors.numpy import load_file

from nemo_automodel.components.speculative.serve_vllm import main

BENCH = {
    "k": 4, "acceptance_length": 3.25, "acceptance_length_interval": [3.1, 3.4], "useful_tokens_per_step": 3.1,
    "acceptance_per_position": [0.9, 0.7], "tokens_per_s": 700.0, "baseline_tokens_per_s": 350.0, "speedup": 2.0,
    "speedup_interval": [1.9, 2.1], "prompts": 60, "concurrency": 1, "temperature": 0.0,
    "predicted": {"agrees": True, "dtype": "bfloat16", "acceptance_length": 3.24},
    "subsets": [{"name": "math", "acceptance": {"acceptance_length": 2.9}}],
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> dict[str, str]:
    """A run of ours with one checkpoint, its target, and what was measured."""
    model = tmp_path / "run" / "checkpoints" / "epoch_2_step_700" / "model"
    write_draft(model)
    data = {"train": "/home/me/secret-place/chats.jsonl", "max_rows": 5000}
    train = {"micro_batch_size": 4, "grad_accumulation_steps": 2, "seq_length": 256, "lr": 1e-4, "seed": 7}
    job = {"data": data, "train": train, "draft": {"num_layers": 2, "num_depths": 4}}
    (tmp_path / "run" / "train_job.json").write_text(json.dumps(job))
    result = {"checkpoint": str(model), "benchmark": BENCH, "versions": {"vllm": "0.32.0"}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    return {
        "--draft": str(model), "--target": str(write_target(tmp_path / "target")), "--out": str(tmp_path / "out"),
        "--result": str(tmp_path / "result.json"), "--vllm-version": "0.32",
    }  # fmt: skip


def publish(flags: dict[str, str], *more: str) -> int:
    return main(["publish", *(word for pair in flags.items() for word in pair), *more])


def test_the_folder_holds_the_export_and_a_card_with_numbers_and_their_conditions(run, tmp_path, capsys) -> None:
    assert publish(run, "--target-name", "org/model") == 0
    out = tmp_path / "out"
    assert capsys.readouterr().out.strip() == str(out)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "fc.weight" in load_file(out / "model.safetensors")
    card = (out / "README.md").read_text()
    for told in ('base_model: "org/model"', "- p-eagle", "epoch 2, step 700", "chats.jsonl, the first 5000 rows",
                 "8 rows a step",
                 "| acceptance length | 3.250 (3.100 to 3.400) |", "| speedup | 2.00x (1.90 to 2.10) |",
                 "K=4, 60 prompts, 1 at once, greedy, vLLM 0.32.0", "acceptance length, math | 2.900", "agrees",
                 "vllm serve org/model --speculative-config", '"parallel_drafting": true'):  # fmt: skip
        assert told in card, told
    assert "secret-place" not in card and str(tmp_path) not in card  # no place on this machine


def test_the_speculators_form_names_target_method_and_depth(run, tmp_path) -> None:
    assert publish(run, "--speculators", "--target-name", "org/model", "--num-speculative-tokens", "3") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    settings = config["speculators_config"]
    assert config["speculators_model_type"] == "peagle" and settings["verifier"] == {"name_or_path": "org/model"}
    assert settings["proposal_methods"][0]["speculative_tokens"] == 3
    inner = config["transformer_layer_config"]
    assert (inner["num_hidden_layers"], inner["model_type"], inner["rope_theta"]) == (1, "llama", 10000.0)
    assert "architectures" not in inner and "pard_token" not in inner  # vLLM puts its own there
    assert (config["mask_token_id"], config["eagle_aux_hidden_state_layer_ids"]) == (3, [2, 4, 5])
    assert config["norm_before_residual"] is False and config["draft_vocab_size"] == 64
    assert f"vllm serve {tmp_path.name}" not in (card := (tmp_path / "out" / "README.md").read_text())
    assert "vllm serve out\n" in card


def test_vllm_reads_the_speculators_form_as_it_reads_the_export(run, tmp_path, capsys) -> None:
    """By our own reader of that format: the plan for the published folder asks for the same draft."""
    publish(run, "--speculators")
    published = {**run, "--draft": str(tmp_path / "out"), "--out": str(tmp_path / "again")}
    published.pop("--result")
    publish(published)
    first = {**run, "--out": str(tmp_path / "plain")}
    publish(first)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("again", "plain")]
    for key in ("mask_token_id", "pard_token", "eagle_aux_hidden_state_layer_ids", "num_hidden_layers", "rope_theta",
                "draft_vocab_size", "hidden_size", "head_dim"):  # fmt: skip
        assert configs[0].get(key) == configs[1].get(key), key
    assert not any(config.get("norm_before_residual") for config in configs)  # absent: false


def test_an_eagle3_draft_with_a_small_vocabulary_keeps_its_map(run, tmp_path) -> None:
    draft = write_draft(
        tmp_path / "eagle3",
        draft_config(parallel_drafting=..., num_depths=..., mask_token_id=..., ttt_steps=5, draft_vocab_size=32),
        draft_tensors(draft_vocab=32, mask=False),
    )
    run |= {"--draft": str(draft)}
    run.pop("--result")
    assert publish(run, "--speculators") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and "mask_token_id" not in config
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert "d2t" in load_file(tmp_path / "out" / "model.safetensors")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Nothing yet." in card and "not recorded" in card and "- eagle3" in card


def test_numbers_of_another_draft_are_refused(run, tmp_path, capsys) -> None:
    run |= {"--draft": str(write_draft(tmp_path / "another"))}
    assert publish(run) == 1 and "give the result.json of this draft" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_there_already_is_not_written_over(run, tmp_path, capsys) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    assert publish(run) == 1 and "is there already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    assert not list(tmp_path.glob(".out*"))  # no half-written folder stays


def test_nothing_is_uploaded_unless_told(run, tmp_path, monkeypatch, capsys) -> None:
    calls = []
    monkeypatch.setattr(huggingface_hub, "create_repo", lambda repo, **more: calls.append((repo, more)))
    monkeypatch.setattr(huggingface_hub, "upload_folder", lambda **more: calls.append(more) or "its address")
    assert publish(run) == 0 and calls == []
    run |= {"--out": str(tmp_path / "second")}
    assert publish(run, "--push", "me/draft") == 1  # a target that nobody else has
    assert "--target-name" in capsys.readouterr().err and calls == []
    assert publish(run, "--push", "me/draft", "--private", "--target-name", "org/model") == 0
    assert calls == [("me/draft", {"private": True, "exist_ok": True}),
                     {"repo_id": "me/draft", "folder_path": str(tmp_path / "second")}]  # fmt: skip
    assert "its address" in capsys.readouterr().err


def test_a_refused_upload_is_one_line_and_the_folder_stays(run, tmp_path, monkeypatch, capsys) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("401: who are you?")

    monkeypatch.setattr(huggingface_hub, "create_repo", refuse)
    assert publish(run, "--push", "me/draft", "--target-name", "org/model") == 1
    assert "not uploaded: 401" in capsys.readouterr().err and (tmp_path / "out" / "README.md").is_file()
