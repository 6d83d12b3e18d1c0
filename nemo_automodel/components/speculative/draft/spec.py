# SPDX-License-Identifier: Apache-2.0
"""The draft's `config.json`: its sole reader and writer. Plain Python, no torch.

Keys and class name follow what NeMo Automodel writes, so that tools of that world read our drafts; what they leave
out and vLLM needs (true layer count, aux layer ids, rope in both spellings) is always written. See docs/fixups.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

ARCHITECTURE = "LlamaEagle3DraftModel"
QK_NORM_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"  # vLLM's layers with q_norm and k_norm


def default_aux_layer_ids(num_target_layers: int) -> tuple[int, int, int]:
    """Three distinct ascending ids in 1..n-1; id k is the residual stream entering layer k (HF `hidden_states[k]`).

    vLLM's own default (2, n//2, n-3) collides for n = 4, 5, 6; here the nearest distinct triple is taken.

    Raises:
        ValueError: fewer than 4 target layers have no three distinct ids in range.
    """
    n = num_target_layers
    if n < 4:
        raise ValueError(f"a target of {n} layers has no three distinct aux layers in 1..{n - 1}")
    low, mid, high = sorted((2, n // 2, n - 3))
    if len({low, mid, high}) == 3 and low >= 1:
        return low, mid, high
    low = max(1, min(low, n - 3))
    mid = max(low + 1, min(n // 2, n - 2))
    return low, mid, max(mid + 1, min(n - 3, n - 1))


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the draft: base and, if any, the scaling dict in HF's spelling."""

    theta: float
    scaling: Mapping[str, Any] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RopeSpec:
        """Read either spelling: `rope_parameters` (transformers 5) before `rope_theta` + `rope_scaling`."""
        both = dict(config.get("rope_parameters") or {})
        theta = both.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        scaling = both or dict(config.get("rope_scaling") or {})
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        return cls(float(theta), None if kind == "default" else scaling)

    def to_config(self) -> dict[str, Any]:
        """Both spellings; effective values are equal. No nulls (vLLM's readers take a null for a value)."""
        kind = dict(self.scaling) if self.scaling else {"rope_type": "default"}
        out: dict[str, Any] = {"rope_theta": self.theta, "rope_parameters": {**kind, "rope_theta": self.theta}}
        if self.scaling:
            out["rope_scaling"] = dict(self.scaling)
        return out


@dataclass(frozen=True)
class DraftSpec:
    """Shape and convention of one draft; sizes in elements."""

    hidden_size: int  # H
    target_hidden_size: int  # H of the target; fc takes 3 of these
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int  # V: the target's
    draft_vocab_size: int
    max_position_embeddings: int
    rope: RopeSpec
    aux_layer_ids: tuple[int, ...]
    mask_token_id: int | None  # P-EAGLE's; None for EAGLE-3
    num_depths: int  # K; for EAGLE-3 the steps of its training-time test
    down_sample_ratio: float  # this and the next are P-EAGLE's
    down_sample_ratio_min: float
    dtype: str = "float32"  # of the saved weights: "float32" or "bfloat16"
    parallel_drafting: bool = True  # P-EAGLE; False: EAGLE-3
    ttt_loss_decay: float = 1.0  # EAGLE-3: step s of training weighs this to the power of s
    fc_norm: bool = False  # each of the three aux states has a norm of its own before fc
    norm_output: bool = False  # EAGLE-3: the state fed back is the one after the last norm, not the one before it
    norm_before_residual: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def to_config(self) -> dict[str, Any]:
        """The dict for `config.json`; no nulls, no `quantization_config`, no `layer_types`."""
        config: dict[str, Any] = {
            "architectures": [QK_NORM_ARCHITECTURE if self.qk_norm else ARCHITECTURE],
            "model_type": "qwen3" if self.qk_norm else "llama",
            "parallel_drafting": self.parallel_drafting,
            **self._method_config(),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "norm_before_residual": self.norm_before_residual,
            "norm_output": self.norm_output,
            "fc_norm": self.fc_norm,
            "dtype": self.dtype,
            **self.rope.to_config(),
        }
        tokens = {key: getattr(self, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return config | {key: value for key, value in tokens.items() if value is not None}

    def _method_config(self) -> dict[str, Any]:
        """What only one of the two kinds has."""
        if not self.parallel_drafting:
            return {"ttt_steps": self.num_depths, "ttt_loss_decay": self.ttt_loss_decay}
        return {
            "num_depths": self.num_depths,
            "down_sample_ratio": self.down_sample_ratio,
            "down_sample_ratio_min": self.down_sample_ratio_min,
            "mask_token_id": self.mask_token_id,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DraftSpec:
        """Read a config.json that `to_config` or our export wrote.

        Without `parallel_drafting`, a mask token tells P-EAGLE. An EAGLE-3 draft that names no `ttt_steps` has K = 1.

        Raises:
            KeyError: a key that fixes the shape is missing; its name is the message.
        """
        parallel = config.get("parallel_drafting", "pard_token" in config or "mask_token_id" in config)
        return cls(
            hidden_size=config["hidden_size"],
            target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            intermediate_size=config["intermediate_size"],
            rms_norm_eps=config["rms_norm_eps"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            rope=RopeSpec.from_config(config),
            aux_layer_ids=tuple(config["eagle_aux_hidden_state_layer_ids"]),
            mask_token_id=config["mask_token_id"] if parallel else None,
            num_depths=config["num_depths"] if parallel else config.get("ttt_steps", 1),
            down_sample_ratio=config.get("down_sample_ratio", 1.0),
            down_sample_ratio_min=config.get("down_sample_ratio_min", 1.0),
            dtype=config.get("dtype", "float32"),
            parallel_drafting=bool(parallel),
            ttt_loss_decay=config.get("ttt_loss_decay", 1.0),
            fc_norm=bool(config.get("fc_norm", False)),
            norm_output=bool(config.get("norm_output", False)),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            qk_norm=QK_NORM_ARCHITECTURE in config.get("architectures", []),
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=config.get("eos_token_id"),
            pad_token_id=config.get("pad_token_id"),
        )
