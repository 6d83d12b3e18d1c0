# SPDX-License-Identifier: Apache-2.0
"""vLLM's loader without vLLM: unknown, missing, colliding names and wrong shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from doctor_cases import BIASES, REDUCED, bare, eagle3, ones, served
from drafts import H, V, draft_tensors

from nemo_automodel.components.speculative.serve.replay import replay


def shapes(tensors: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, value.shape) for name, value in tensors.items()]


def test_the_replay_of_a_fitting_draft_is_clean() -> None:
    assert replay(served(), shapes(bare()), parallel=True).clean
    assert replay(served(draft_vocab_size=32), shapes(REDUCED), parallel=True).clean
    assert replay(eagle3(), shapes(bare()), parallel=False).clean  # mask_hidden is skipped


def test_the_replay_names_what_the_loader_would_stumble_over() -> None:
    prefixed = replay(served(), shapes(draft_tensors()), parallel=True)
    assert "model.fc.weight" in prefixed.unknown and "model.fc.weight" in prefixed.missing
    both = bare() | {"midlayer.hidden_norm.weight": ones(H)}
    (pair,) = replay(served(), shapes(both), parallel=True).colliding
    assert set(pair) == {"layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"}
    full = replay(served(), shapes(bare(d2t=np.zeros(V))), parallel=True)
    assert full.unknown == ("d2t",)
    wrong = replay(served(), shapes(bare(mask_hidden=ones(H))), parallel=True)
    assert wrong.misshapen == (("mask_hidden", (H,), (3 * H,)),)
    biased = replay(served(attention_bias=True), shapes(bare() | BIASES), parallel=True)
    assert biased.missing == ("model.layers.0.self_attn.o_proj.bias",)
    no_map = {name: value for name, value in REDUCED.items() if name != "d2t"}
    assert replay(served(draft_vocab_size=32), shapes(no_map), parallel=True).missing == ("draft_id_to_target_id",)


@pytest.mark.parametrize(
    ("config", "aux"),
    [
        (served(num_aux_hidden_states=4), 4),
        (served(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}), 2),
        (served(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]), 3),  # llama_eagle3.py does not count these
        (served(architectures=["Eagle3Qwen3ForCausalLM"], eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]), 4),
        (served(architectures=["Eagle3Qwen3ForCausalLM"], num_aux_layers=2, num_aux_hidden_states=4), 2),
    ],
)
def test_the_replay_counts_aux_layers_as_each_class_does(config: dict[str, Any], aux: int) -> None:
    found = replay(config, [("fc.weight", (H, aux * H))], parallel=False)
    assert not found.misshapen
