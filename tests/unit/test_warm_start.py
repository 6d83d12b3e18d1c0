# SPDX-License-Identifier: Apache-2.0
"""`draft.init_from`: the weights of an earlier draft are the first ones, or one line says why they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_train import make_job

from nemo_automodel.components.speculative.draft.io import load_draft
from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.components.speculative.train.data import read_data
from nemo_automodel.components.speculative.train.job import TrainJob
from nemo_automodel.components.speculative.train.setup import build_models
from nemo_automodel.config.schema import DraftKind
from nemo_automodel.errors import ConfigError

EAGLE3 = {"kind": DraftKind.eagle3, "ttt_steps": 2}


def build(job: TrainJob) -> SimpleNamespace:
    """The models before the first step, and what was said."""
    said: list[str] = []
    models = build_models(job, read_data(job, said.append), None, said.append)
    return SimpleNamespace(draft=models.draft, spec=models.spec, said="\n".join(said))


def save(folder: Path, draft: DraftNetwork, spec: object, **config: object) -> Path:
    folder.mkdir(parents=True)
    save_file(draft.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(spec.to_config() | config))
    return folder


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run whose only checkpoint is an EAGLE-3 draft of 20 tokens, none of its weights what a fresh one's are."""
    made = build(make_job(tmp_path, "old", draft=EAGLE3 | {"draft_vocab_size": 20}))
    with torch.no_grad():
        for p in made.draft.parameters():
            p.add_(0.25)
        ids = torch.arange(20) * 3
        made.draft.d2t.copy_(ids - torch.arange(20))
        made.draft.t2d.zero_()[ids] = True
    save(tmp_path / "old/checkpoints/epoch_1_step_3/model", made.draft, made.spec)
    (tmp_path / "old/checkpoints/LATEST").write_text("epoch_1_step_3\n")
    return tmp_path / "old"


def job_from(tmp_path: Path, source: Path | str, **draft: object) -> TrainJob:
    settings = EAGLE3 | {"draft_vocab_size": 20, "init_from": str(source)} | draft
    return make_job(tmp_path, "new", draft=settings)


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/LATEST", "checkpoints/epoch_1_step_3",
                                   "checkpoints/epoch_1_step_3/model"])  # fmt: skip
def test_weights_and_vocabulary_come_from_any_place_of_a_run(earlier: Path, tmp_path: Path, place: str) -> None:
    made = build(job_from(tmp_path, earlier / place))
    saved = load_draft(earlier / "checkpoints/epoch_1_step_3/model")[0].state_dict()
    assert made.draft.state_dict().keys() == saved.keys()
    for name, tensor in made.draft.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    assert "starts with the weights of" in made.said and "of the supervised ones" not in made.said


def test_the_vocabulary_map_is_made_anew_when_sizes_differ_and_the_head_is_refused(
    earlier: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(job_from(tmp_path, earlier, draft_vocab_size=24))
    assert str(caught.value).count("\n") == 0
    assert (
        caught.value.where == "draft.init_from" and "lm_head.weight [20, 32] instead of [24, 32]" in caught.value.found
    )


def test_a_draft_in_nemo_automodels_form_is_taken(earlier: Path, tmp_path: Path) -> None:
    """Shards of an index under `model/consolidated`, the target's depth in the config, no aux ids, bfloat16."""
    source = earlier / "checkpoints/epoch_1_step_3/model"
    folder = tmp_path / "nemo/epoch_1_step_9/model/consolidated"
    folder.mkdir(parents=True)
    tensors = {
        name: t.bfloat16() if t.is_floating_point() else t
        for name, t in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    names = {name: "model-00001-of-00001.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    config = {
        "num_hidden_layers": 4,
        "draft_vocab_size": 20,
        "norm_output": False,
        "rope_parameters": {"rope_theta": 10000.0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    made = build(job_from(tmp_path, tmp_path / "nemo/epoch_1_step_9"))
    assert torch.equal(made.draft.model.fc.weight, tensors["model.fc.weight"].float())
    assert made.draft.vocab_ids().tolist() == list(range(0, 60, 3))


def test_the_other_kind_is_taken_without_the_mask_slot(earlier: Path, tmp_path: Path) -> None:
    made = build(job_from(tmp_path, earlier, kind=DraftKind.peagle, num_depths=2))
    saved = load_draft(earlier / "checkpoints/epoch_1_step_3/model")[0]
    assert torch.equal(made.draft.model.fc.weight, saved.model.fc.weight)
    assert "mask_hidden stays fresh" in made.said
    save(tmp_path / "parallel", made.draft, made.spec)
    again = build(job_from(tmp_path, tmp_path / "parallel"))
    assert "mask_hidden is left behind" in again.said and not hasattr(again.draft, "mask_hidden")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_layers": 2}, "missing model.layers.1.input_layernorm.weight"),
        ({"aux_layer_ids": [1, 2, 3]}, None),
        ({"norm_output": True}, "norm_output False instead of True"),
        ({"fc_norm": True}, "missing model.fc_norm.0.weight"),
    ],
)
def test_what_does_not_fit_is_one_line(earlier: Path, tmp_path: Path, change: dict, told: str | None) -> None:
    job = job_from(tmp_path, earlier, **change)
    if told is None:  # the default ids of 4 layers
        build(job)
        return
    with pytest.raises(ConfigError) as caught:
        build(job)
    assert told in caught.value.found and "\n" not in str(caught.value)


def test_other_aux_layers_or_another_rope_are_refused(earlier: Path, tmp_path: Path) -> None:
    config = earlier / "checkpoints/epoch_1_step_3/model/config.json"
    values = json.loads(config.read_text())
    ids = values["eagle_aux_hidden_state_layer_ids"]
    for change, told in (
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, f"[1, 2, 4] instead of {ids}"),
        ({"rope_theta": 5e5, "rope_parameters": None}, "rope 500000"),
    ):
        config.write_text(json.dumps(values | change))
        with pytest.raises(ConfigError, match="does not fit") as caught:
            build(job_from(tmp_path, earlier))
        assert told in caught.value.found


def test_a_place_without_a_draft_is_refused_with_the_places_looked_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build(job_from(tmp_path, tmp_path / "nowhere"))
    assert "nowhere/model/consolidated" in caught.value.found


def test_a_map_or_a_mask_slot_that_fits_no_draft_is_one_line(earlier: Path, tmp_path: Path) -> None:
    """Target ids where offsets belong; three states of another width."""
    file = earlier / "checkpoints/epoch_1_step_3/model/model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"d2t": tensors["d2t"] * 9}, file)
    with pytest.raises(ConfigError, match="d2t, added to .*, not ascending within") as caught:
        build(job_from(tmp_path, earlier))
    assert "\n" not in str(caught.value)
    save_file({name: tensor for name, tensor in tensors.items() if name != "d2t"}, file)
    with pytest.raises(ConfigError, match="missing d2t"):
        build(job_from(tmp_path, earlier))
    save_file(tensors | {"mask_hidden": torch.zeros(1, 1, 5)}, file)
    with pytest.raises(ConfigError, match=r"mask_hidden \[1, 1, 5\] instead of"):
        build(job_from(tmp_path, earlier, kind=DraftKind.peagle, num_depths=2))
