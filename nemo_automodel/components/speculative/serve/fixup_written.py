# SPDX-License-Identifier: Apache-2.0
"""Values that mean one thing and are written as another kind: "128" or 128.0 for 128, 1 or "true" for true.

Configs that went through YAML, a spreadsheet or a shell have them. transformers 5.19 refuses a size, `rms_norm_eps` or
a flag of its own (`tie_word_embeddings`, `attention_bias`, `mlp_bias`) of another kind, with a traceback; it hands on
what it does not know itself, such as `fc_norm: "false"`, `rope_theta: "10000"` or `draft_vocab_size: 0`, as it stands.
vLLM 0.32 refuses a rope factor that is text, or 0, and ends in a TypeError over `rope_theta` as text; a flag that is
"false" counts as true there (all run).
"""

from __future__ import annotations

import math
import re
from typing import Any, Callable

from nemo_automodel.components.speculative.serve.ledger import Ledger

_WHOLE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_WHOLE += ("head_dim", "vocab_size", "draft_vocab_size", "max_position_embeddings", "target_hidden_size")
_WHOLE += ("num_aux_hidden_states", "mask_token_id", "pard_token", "ptd_token_id", "dspark_noise_token_id")
_WHOLE += ("num_depths", "ttt_steps", "ttt_length", "sliding_window", "original_max_position_embeddings")
_REAL = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor")
_REAL += ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "logit_scale")
_FLAGS = ("tie_word_embeddings", "norm_output", "norm_before_residual", "fc_norm", "norm_before_fc", "mlp_bias")
_FLAGS += ("attention_bias", "use_sliding_window", "parallel_drafting")
_LISTS = ("eagle_aux_hidden_state_layer_ids", "target_layer_ids")
_LIST = re.compile(r"[\[(]?\s*(\d{1,9}(?:\s*,\s*\d{1,9})+)\s*[\])]?", re.ASCII)  # "2,18,33" or "[2, 18, 33]"
_NONE_OF_ITS_OWN = ("draft_vocab_size", "target_hidden_size")  # where 0 stands for "as the target's"
_NESTED = ("rope_scaling", "rope_parameters", "eagle_config", "dflash_config")
_WHY = "the same, in the one kind that every reader takes"


def read_as_meant(ledger: Ledger) -> None:
    """Write such values in their own kind; what can be read in two ways, or not at all, stays to be judged later."""
    for key, value in list(ledger.config.items()):
        if key in _NESTED and isinstance(value, dict):
            ledger.config[key] = _nested(ledger, key, value)
            continue
        if (meant := _meant(key, value)) is not value:
            ledger.set(key, meant, f"it was {value!r}: {_WHY}")
    for key in _NONE_OF_ITS_OWN:
        if ledger.config.get(key) == 0:
            ledger.drop(key, "0: none of its own")


def _nested(ledger: Ledger, outer: str, values: dict[str, Any]) -> dict[str, Any]:
    inner = Ledger(dict(values))
    for key, value in values.items():
        if (meant := _meant(key, value)) is not value:
            inner.set(key, meant, _WHY)
    if inner.changes:
        ledger.set(outer, inner.config, _WHY)
    return inner.config


def _meant(key: str, value: Any) -> Any:
    """`value` itself when there is nothing to mend."""
    kinds: dict[str, Callable[[Any], Any]] = dict.fromkeys(_WHOLE, _whole) | dict.fromkeys(_REAL, _real)
    kinds |= dict.fromkeys(_FLAGS, _flag) | dict.fromkeys(_LISTS, _list) | {"hidden_act": _silu}
    return kinds[key](value) if key in kinds else value


def _whole(value: Any) -> Any:
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _real(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def _flag(value: Any) -> Any:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    return bool(value) if type(value) in (int, float) and value in (0, 1) else value


def _list(value: Any) -> Any:
    found = _LIST.fullmatch(value.strip()) if isinstance(value, str) else None
    return [int(part) for part in found[1].split(",")] if found else value


def _silu(value: Any) -> Any:
    """`swish` is the older name of the same function, in transformers as well."""
    return "silu" if isinstance(value, str) and value != "silu" and value.lower() in ("silu", "swish") else value
