# SPDX-License-Identifier: Apache-2.0
"""`serve.export_shared=omit`: what equals the target's is left out of the export, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafts import draft_config, draft_tensors, write_draft, write_target
from safetensors import safe_open
from safetensors.numpy import save_file

from nemo_automodel.components.speculative.serve import shards
from nemo_automodel.components.speculative.serve.export import export, plan_export
from nemo_automodel.components.speculative.serve.fixup import plan_fixups
from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.shared import omit_shared
from nemo_automodel.components.speculative.serve.target_facts import read_target
from nemo_automodel.components.speculative.serve.types import Engine, Fixups, ServeSpec, SharedTensors
from nemo_automodel.components.speculative.serve.vllm_release import release_for

DRAFT = draft_tensors()
EMBED, HEAD = DRAFT["model.embed_tokens.weight"], DRAFT["lm_head.weight"]


def planned(
    folder: Path, theirs: dict[str, Any], *, config: Any = None, tensors: Any = None, target: Any = None, **options: Any
) -> tuple[Fixups, set[str]]:
    """The plan for a draft beside a target with these weights, and the names in its export."""
    draft = write_draft(folder / "d", config, tensors)
    where = write_target(folder / "t", **(target or {}))
    if theirs:
        save_file(theirs, where / "model.safetensors")
    wanted = {"export_shared": SharedTensors.omit, "export_dir": str(folder / "x")} | options
    spec, found, facts = (
        ServeSpec(str(draft), str(where), **wanted),
        resolve(str(draft), folder),
        read_target(str(where)),
    )
    plan = omit_shared(plan_fixups(found, release_for("0.32"), facts, spec), found, facts, spec)
    with safe_open(export(plan_export(found, plan, spec, folder)).dir / "model.safetensors", "numpy") as file:
        return plan, set(file.keys())


ALL = {name.removeprefix("model.") for name in DRAFT}


@pytest.mark.parametrize(
    ("theirs", "target", "gone"),
    [
        ({"model.embed_tokens.weight": EMBED, "lm_head.weight": HEAD}, {}, {"embed_tokens.weight", "lm_head.weight"}),
        ({"model.language_model.embed_tokens.weight": EMBED, "lm_head.weight": -HEAD}, {}, {"embed_tokens.weight"}),
        ({"model.embed_tokens.weight": EMBED}, {"tie_word_embeddings": True}, {"embed_tokens.weight"}),
        ({"model.embed_tokens.weight": HEAD}, {"tie_word_embeddings": True}, {"lm_head.weight"}),
        ({"model.embed_tokens.weight": HEAD}, {}, set()),
        ({"model.embed_tokens.weight": EMBED[:63], "lm_head.weight": HEAD.astype("float32")}, {}, set()),
    ],
)
def test_what_equals_the_target_s_is_left_out(tmp_path: Path, theirs: Any, target: Any, gone: set[str]) -> None:
    plan, names = planned(tmp_path, theirs, target=target)
    assert ALL - names == gone
    assert bool(gone) != any("nothing is left out" in warning for warning in plan.warnings)


def test_one_byte_at_the_end_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 100)  # several pieces, the last one short
    other = EMBED.copy()
    other[-1, -1] += 1
    assert "embed_tokens.weight" in planned(tmp_path / "a", {"model.embed_tokens.weight": other})[1]
    assert "embed_tokens.weight" not in planned(tmp_path / "b", {"model.embed_tokens.weight": EMBED})[1]


THEIRS = {"model.embed_tokens.weight": EMBED, "lm_head.weight": HEAD}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"target": {"quantization_config": {"quant_method": "fp8"}}}, "quantised"),
        ({"extra_args": {"pipeline_parallel_size": 2}}, "pipeline parallelism"),
        ({"engine": Engine.sglang}, "rules of its own"),
        ({"theirs": {}}, "cannot be read here"),
    ],
)
def test_where_vllm_would_not_share_everything_is_kept(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    plan, names = planned(tmp_path, options.pop("theirs", THEIRS), **options)
    assert names == ALL and any(text in warning for warning in plan.warnings)


def test_not_asked_for_nothing_is_read_or_left_out(tmp_path: Path) -> None:
    plan, names = planned(tmp_path, THEIRS, export_shared=SharedTensors.keep)
    assert names == ALL and not any("export_shared" in warning for warning in plan.warnings)


def test_a_reduced_head_is_never_the_target_s(tmp_path: Path) -> None:
    tensors = draft_tensors(draft_vocab=32)
    theirs = {"model.embed_tokens.weight": EMBED, "lm_head.weight": tensors["lm_head.weight"]}
    _, names = planned(tmp_path, theirs, config=draft_config(draft_vocab_size=32), tensors=tensors)
    assert "lm_head.weight" in names and "embed_tokens.weight" not in names


def test_embeddings_that_a_tied_head_is_made_from_stay(tmp_path: Path) -> None:
    tensors = {name: value for name, value in DRAFT.items() if name != "lm_head.weight"}
    tied = draft_config(tie_word_embeddings=True)
    both = {"model.embed_tokens.weight": EMBED}
    assert (
        "lm_head.weight"
        in planned(tmp_path / "a", both | {"lm_head.weight": np.zeros_like(EMBED)}, config=tied, tensors=tensors)[1]
    )
    gone = planned(tmp_path / "b", both, config=tied, tensors=tensors, target={"tie_word_embeddings": True})[1]
    assert not {"lm_head.weight", "embed_tokens.weight"} & gone
