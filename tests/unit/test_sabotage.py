# SPDX-License-Identifier: Apache-2.0
"""A draft damaged after its export: the counts of what is served part from the checkpoint's, and the cause is named.

The reference decoder reads the intact checkpoint; run on the damaged copy it stands for the server.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_reference import K, V, edit, make_parallel, make_sequential, target_dir  # noqa: F401
from transformers import Qwen3ForCausalLM

from nemo_automodel.components.speculative.bench.diagnose import Diagnosis, compare_folders, judge_counts
from nemo_automodel.components.speculative.bench.hypotheses import Asked, ask_target, plan_hypotheses, try_each
from nemo_automodel.components.speculative.bench.parity import compare
from nemo_automodel.components.speculative.bench.reference import Job
from nemo_automodel.components.speculative.draft.io import load_draft
from nemo_automodel.components.speculative.serve.counters import SpecDecodeCounters

Tensors = dict[str, torch.Tensor]


def tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file({name: t.contiguous() for name, t in held.items()}, folder / "model.safetensors")


def config(**keys) -> Callable[[Path], None]:
    return lambda folder: edit(folder, keys)


def in_tensors(change: Callable[[Tensors], None]) -> Callable[[Path], None]:
    return lambda folder: tensors(folder, change)


def name_of(held: Tensors, end: str) -> str:
    return next(name for name in held if name.endswith(end))


def rotate_fc(held: Tensors) -> None:
    name = name_of(held, "fc.weight")
    held[name] = torch.cat([held[name].chunk(3, 1)[i] for i in (1, 2, 0)], 1)


def set_ones(end: str) -> Callable[[Tensors], None]:
    """As vLLM does with a norm that it does not find."""

    def change(held: Tensors) -> None:
        held[name_of(held, end)] = torch.ones_like(held[name_of(held, end)])

    return change


def sharpen(held: Tensors) -> None:
    """Attention that looks at some positions and not at others, and embeddings that are not the target's."""
    for name in held:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            held[name] *= 3
    held[name_of(held, "embed_tokens.weight")] *= torch.linspace(0.5, 2, 16)


def permute(held: Tensors) -> None:
    ids = held["d2t"] + torch.arange(len(held["d2t"]))
    held["d2t"] = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))] - torch.arange(len(ids))


def scale_norm(held: Tensors) -> None:
    held[name_of(held, "layers.0.post_attention_layernorm.weight")] *= -1


NEW_ROPE = {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
# damage -> (kind of draft, what is done, area by the folders, words of the cause by counts alone; None: cannot be told)
SABOTAGE = {
    "aux ids one higher": ("p", config(eagle_aux_hidden_state_layer_ids=[2, 3, 4]), "aux layers", "[2, 3, 4]"),
    "aux ids one lower": ("p", config(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), "aux layers", "[0, 1, 2]"),
    "rope theta": ("s", config(**NEW_ROPE), "rope", "rope theta"),
    "mask token": ("p", config(mask_token_id=2, pard_token=2), "mask token", "mask token id 2"),
    "d2t permuted": ("s", in_tensors(permute), "vocabulary map", None),
    "d2t dropped": ("s", in_tensors(lambda held: held["d2t"].zero_()), "vocabulary map", "d2t missing"),
    "hidden_norm left out": ("p", in_tensors(set_ones("layers.0.hidden_norm.weight")), "weights", "hidden_norm"),
    "fc rotated": ("p", in_tensors(rotate_fc), "fc", "fc blocks rotated by one"),
    "norm_before_residual": ("s", config(norm_before_residual=True), "conventions", "norm_before_residual=True"),
    "norm_output": ("s", config(norm_output=True), "conventions", "norm_output=True"),
    "embeddings of the target": ("p", "embed", "weights", "target's embeddings"),
    "a norm's sign": ("p", in_tensors(scale_norm), "weights", None),
}


@pytest.fixture(scope="module")
def world(target_dir: Path, tmp_path_factory: pytest.TempPathFactory):  # noqa: F811
    """Intact drafts of both kinds, what is asked, and every hypothesis' counts for each, made once."""
    root = tmp_path_factory.mktemp("world")
    target = Qwen3ForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    make_parallel(root / made("p", root), target, num_layers=1)
    make_sequential(root / made("s", root), target, False)
    for kind in "ps":
        tensors(root / kind, sharpen)
    texts = [" ".join(f"t{6 + (7 * i + 3 * j) % 18}" for j in range(1 + i % 7)) for i in range(36)]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ask_target(Job(str(target_dir), "", str(root / "rows.jsonl"), 36, 24, K, "float32"), (1, 2, 3))
    tried = {kind: [asdict(one) for one in try_each(asked, load_draft(root / kind)[0])] for kind in "ps"}
    return World(root, asked, tried, target)


class World(NamedTuple):
    root: Path
    asked: Asked
    tried: dict[str, list[dict]]
    target: Qwen3ForCausalLM

    def served_by(self, folder: Path) -> SpecDecodeCounters:
        counts = self.asked.counts(load_draft(folder)[0])
        accepted = counts.accepted_per_position
        return SpecDecodeCounters(counts.num_drafts, counts.num_drafts * K, sum(accepted), accepted)


def made(kind: str, root: Path) -> str:
    (root / kind).mkdir()
    return kind


@pytest.mark.parametrize("damage", SABOTAGE)
def test_what_is_served_differently_is_detected_and_named(world, tmp_path: Path, damage: str) -> None:
    root, tried, target = world.root, world.tried, world.target
    kind, sabotage, area, words = SABOTAGE[damage]
    copy = tmp_path / "served"
    shutil.copytree(root / kind, copy)
    if sabotage == "embed":
        embed = target.model.embed_tokens.weight.detach().clone()
        tensors(copy, lambda held: held.update({name_of(held, "embed_tokens.weight"): embed}))
    else:
        sabotage(copy)
    served, intact = world.served_by(copy), world.served_by(root / kind)
    assert not compare(intact, served, "float32").agrees
    found = compare_folders(root / kind, copy)
    assert area in {cause.area for cause in found}, found  # the folders at hand
    diagnosis = judge_counts(tried[kind], served, "float32")  # the counts alone
    if words is None:
        assert not any("gives the served" in cause.proof for cause in diagnosis.causes)
        assert "no cause found" in diagnosis.sentence() or "accepts more" in diagnosis.sentence()
    else:
        assert words in diagnosis.causes[0].what and "gives the served counts" in diagnosis.causes[0].proof


def test_the_intact_draft_is_blamed_for_nothing(world) -> None:
    root, tried = world.root, world.tried
    for kind in "ps":
        served = world.served_by(root / kind)
        assert compare_folders(root / kind, root / kind) == ()
        causes = judge_counts(tried[kind], served, "float32").causes
        assert not any("gives the served" in cause.proof for cause in causes)


def swap(one: str, other: str) -> Callable[[Tensors], None]:
    def change(held: Tensors) -> None:
        a, b = name_of(held, one), name_of(held, other)
        held[a], held[b] = held[b], held[a]

    return change


def rearrange_fc(held: Tensors) -> None:
    name = name_of(held, "fc.weight")
    held[name] = torch.cat([held[name].chunk(3, 1)[i] for i in (1, 0, 2)], 1)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (rotate_fc, ["fc.weight has its blocks rotated by 1"]),
        (rearrange_fc, ["fc.weight has its blocks in the order [1, 0, 2]"]),
        (permute, ["d2t is permuted"]),
        (scale_norm, ["post_attention_layernorm.weight differs in 16 of 16 elements"]),
        (set_ones("layers.0.hidden_norm.weight"), ["hidden_norm.weight is all ones"]),
        (lambda held: held[name_of(held, "down_proj.weight")].zero_(), ["down_proj.weight is all zeros"]),
        (swap("gate_proj.weight", "up_proj.weight"),
         ["gate_proj.weight holds the values of layers.0.mlp.up_proj.weight",
          "up_proj.weight holds the values of layers.0.mlp.gate_proj.weight"]),
        (lambda held: held.update({n: held[n].roll(1, 0) for n in held if n.endswith("lm_head.weight")}),
         ["lm_head.weight has its rows in another order"]),
    ],
)  # fmt: skip
def test_how_a_tensor_was_changed_is_said(world, tmp_path: Path, damage, said: list[str]) -> None:
    shutil.copytree(world.root / "s", tmp_path / "served")
    tensors(tmp_path / "served", damage)
    causes = compare_folders(world.root / "s", tmp_path / "served")
    assert len(causes) == len(said)
    assert all(words in cause.what for words, cause in zip(said, causes, strict=True)), causes


def test_a_tensor_that_is_gone_or_new_is_named(world, tmp_path: Path) -> None:
    shutil.copytree(world[0] / "p", tmp_path / "served")
    tensors(tmp_path / "served", lambda held: held.update(extra=held.pop(name_of(held, "mask_hidden"))))
    assert {cause.what for cause in compare_folders(world[0] / "p", tmp_path / "served")} == {
        "mask_hidden is not served", "extra is not in the checkpoint",
    }  # fmt: skip


def test_only_maps_that_a_server_survives_are_tried(world) -> None:
    """A map ordered by frequency has negative offsets; read as ids they index nothing."""
    draft = load_draft(world.root / "s")[0]
    state = dict(draft.state_dict())
    count = torch.arange(len(state["d2t"]))
    state["d2t"] = (state["d2t"] + count).flip(0) - count
    assert (state["d2t"] < 0).any()
    tried = [h for h in plan_hypotheses(draft.spec, state, world.asked.target, ()) if h.area == "vocabulary map"]
    ids = [h.edit(dict(state))["d2t"] + count for h in tried]
    assert len(ids) == 3 and all(0 <= int(i.min()) and int(i.max()) < V for i in ids)


def one(area: str, name: str, *accepted: int) -> dict:
    return {"area": area, "name": name, "num_drafts": 1000, "accepted_per_position": list(accepted)}


def test_in_bf16_the_nearest_within_rounding_comes_first() -> None:
    tried = [
        one("", "as it is", 800, 600),
        one("rope", "a", 705, 500),
        one("fc", "b", 712, 506),
        one("fc", "c", 100, 0),
    ]
    served = SpecDecodeCounters(1000, 2000, 1202, (702, 500))
    diagnosis = judge_counts(tried, served, "bfloat16")
    assert [cause.what for cause in diagnosis.causes] == ["a", "b"]
    assert isinstance(diagnosis, Diagnosis) and diagnosis.checked == ("rope", "fc")
    assert judge_counts(tried, served, "float32").nearest.startswith("rope: a (off by 0.003")


def test_a_checkpoint_that_would_do_better_otherwise_is_told() -> None:
    tried = [one("", "as it is", 300, 100), one("aux layers", "one lower", 800, 600)]
    (cause,) = judge_counts(tried, SpecDecodeCounters(1000, 2000, 400, (300, 100)), "float32").causes
    assert cause.area == "aux layers" and "accepts more: 2.400, as it is 1.400" in cause.proof
