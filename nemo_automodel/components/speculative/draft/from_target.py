# SPDX-License-Identifier: Apache-2.0
"""A draft that starts from the target's last layer instead of from noise.

The deepest aux state goes through fc unchanged (plus noise), the first layer is the target's last one, the last norm
the target's. So the fresh draft says, roughly, the target's own next token, and has to learn to look one further.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemo_automodel.components.speculative.draft.network import DraftNetwork
from nemo_automodel.errors import ConfigError

SAME = (  # name in the target's layer and in the draft's
    "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
)  # fmt: skip
NOISE = 0.1  # of fc's usual start
EMBEDDING = 0.5  # of the usual start: the embedding's half of q, k and v, which the target's layer does not have


@torch.no_grad()
def start_from_layer(draft: DraftNetwork, layer: nn.Module, norm_weight: Tensor) -> None:
    """Copy `layer` (the target's last decoder layer) and the target's final norm [H] into the draft.

    Raises:
        ConfigError: the target's layer is not of Llama's kind, or has other sizes than the draft's.
    """
    first, hidden = draft.model.layers[0], draft.spec.hidden_size
    theirs, own = layer.state_dict(), first.state_dict()
    try:
        for name in SAME:
            own[name].copy_(theirs[name])
        own["hidden_norm.weight"].copy_(theirs["input_layernorm.weight"])
        for part in ("q", "k", "v"):
            name = f"self_attn.{part}_proj.weight"
            own[name][:, :hidden].mul_(EMBEDDING)
            own[name][:, hidden:].copy_(theirs[name])
        draft.model.norm.weight.copy_(norm_weight)
    except (KeyError, RuntimeError) as error:
        raise ConfigError(
            f"the target's last layer does not fit the draft's first ({error})", where="draft.init_from_target",
            remedy="draft.init_from_target=false",
        ) from error  # fmt: skip
    fc = draft.model.fc.weight  # [H, 3H], the deepest state last
    fc.mul_(NOISE)
    fc[:, -hidden:] += torch.eye(hidden)
