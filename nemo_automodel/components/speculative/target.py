# SPDX-License-Identifier: Apache-2.0
"""The only file that runs the target: frozen, in eval mode, without its head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_automodel.components.speculative.draft.spec import DraftSpec, RopeSpec, default_aux_layer_ids
from nemo_automodel.components.speculative.matmul import use_fast_linears
from nemo_automodel.config.schema import DraftConfig, DraftKind
from nemo_automodel.errors import ConfigError

# keys of a config that change logits after lm_head; a draft is trained on lm_head's own
LOGIT_CHANGERS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


@dataclass(frozen=True)
class TargetStates:
    """What a draft learns from; both in the target's dtype, without gradient."""

    aux: Tensor  # [B, T, 3H]: residual streams entering the aux layers, ascending ids
    last: Tensor  # [B, T, H]: after the final norm, the input of lm_head


@dataclass(frozen=True)
class TargetDims:
    """What the draft's shape follows from; sizes in elements."""

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    rope: RopeSpec
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None


def read_target_dims(path: str, *, trust_remote_code: bool = False) -> TargetDims:
    """`TargetDims` from the target's config alone (a folder or a Hub id); no weights are read.

    Raises:
        ConfigError: no config there, or one that is not of a decoder-only language model.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no usable config of a model at {path!r} ({error})",
            where="target.path",
            remedy="target.path=<folder or Hub id of a causal language model>",
        ) from error
    return dims_of(config.get_text_config())


def dims_of(config: Any) -> TargetDims:
    """`TargetDims` of a transformers text config. Raises ConfigError when a size is missing."""
    values = config.to_dict()
    try:
        heads = values["num_attention_heads"]
        return TargetDims(
            hidden_size=values["hidden_size"],
            num_layers=values["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            intermediate_size=values["intermediate_size"],
            rms_norm_eps=values.get("rms_norm_eps") or 1e-6,
            vocab_size=values["vocab_size"],
            max_position_embeddings=values["max_position_embeddings"],
            rope=RopeSpec.from_config(values),
            bos_token_id=values.get("bos_token_id"),
            eos_token_id=values.get("eos_token_id"),
            pad_token_id=values.get("pad_token_id"),
        )
    except KeyError as error:
        raise ConfigError(
            f"the target's config ({values.get('model_type')}) has no {error}",
            where="target.path",
            remedy="take a decoder-only language model",
        ) from error


def build_draft_spec(dims: TargetDims, config: DraftConfig, *, seq_length: int, dtype: str = "float32") -> DraftSpec:
    """The draft's shape: the target's widths and rope, the config's depth; pure.

    Args:
        seq_length: tokens per training row; the draft's `max_position_embeddings` is not below it.
        dtype: of the saved weights, "float32" or "bfloat16".

    Raises:
        ConfigError: a value of `draft.*` that does not fit the target, with its key.
    """
    aux = _aux_layer_ids(dims, config.aux_layer_ids)
    parallel = config.kind is DraftKind.peagle
    return DraftSpec(
        hidden_size=dims.hidden_size,
        target_hidden_size=dims.hidden_size,
        num_layers=config.num_layers,
        num_attention_heads=dims.num_attention_heads,
        num_key_value_heads=dims.num_key_value_heads,
        head_dim=dims.head_dim,
        intermediate_size=dims.intermediate_size,
        rms_norm_eps=dims.rms_norm_eps,
        vocab_size=dims.vocab_size,
        draft_vocab_size=_draft_vocab_size(dims, config.draft_vocab_size),
        max_position_embeddings=max(dims.max_position_embeddings, seq_length + config.trained_depth),
        rope=dims.rope,
        aux_layer_ids=aux,
        mask_token_id=_mask_token_id(dims, config.mask_token_id) if parallel else None,
        num_depths=config.trained_depth,
        down_sample_ratio=config.down_sample_ratio if parallel else 1.0,
        down_sample_ratio_min=config.down_sample_ratio_min if parallel else 1.0,
        dtype=dtype,
        parallel_drafting=parallel,
        ttt_loss_decay=1.0 if parallel else config.ttt_loss_decay,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        bos_token_id=dims.bos_token_id,
        eos_token_id=dims.eos_token_id,
        pad_token_id=dims.pad_token_id,
    )


def _aux_layer_ids(dims: TargetDims, ids: list[int] | None) -> tuple[int, ...]:
    top = dims.num_layers - 1
    if dims.num_layers < 4:
        raise ConfigError(
            f"a target of {dims.num_layers} layers has no three distinct aux layers",
            where="target.path",
            remedy="take a target of at least 4 layers",
        )
    if ids is None:
        return default_aux_layer_ids(dims.num_layers)
    if len(ids) != 3 or list(ids) != sorted(set(ids)) or ids[0] < 1 or ids[-1] > top:
        default = list(default_aux_layer_ids(dims.num_layers))
        raise ConfigError(
            f"{list(ids)} are not three ascending layer ids in 1..{top}",
            where="draft.aux_layer_ids",
            remedy=f"draft.aux_layer_ids={default}".replace(" ", ""),
        )
    return tuple(ids)


def _mask_token_id(dims: TargetDims, token: int | None) -> int:
    remedy = f"draft.mask_token_id=<an id in 0..{dims.vocab_size - 1} that the data never uses>"
    if token is None:
        raise ConfigError("no mask token id", where="draft.mask_token_id", remedy=remedy)
    if not 0 <= token < dims.vocab_size:
        raise ConfigError(
            f"{token} is outside the target's vocabulary of {dims.vocab_size}",
            where="draft.mask_token_id",
            remedy=remedy,
        )
    return token


def _draft_vocab_size(dims: TargetDims, size: int | None) -> int:
    if size is None:
        return dims.vocab_size
    if size > dims.vocab_size:
        raise ConfigError(
            f"{size} is more than the target's vocabulary of {dims.vocab_size}",
            where="draft.draft_vocab_size",
            remedy=f"draft.draft_vocab_size={dims.vocab_size}",
        )
    return size


class Target:
    """The frozen target. `states` never makes logits; the loss does, for the rows it needs."""

    def __init__(self, model: nn.Module, aux_layer_ids: tuple[int, ...]) -> None:
        self.model = model.eval().requires_grad_(False)
        use_fast_linears(self.model)
        self.config = model.config.get_text_config()
        self.dims = dims_of(self.config)
        self.aux_layer_ids = tuple(sorted(aux_layer_ids))
        self._layers = _decoder_layers(model, self.dims.num_layers)
        _check_head(model, self.config)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        aux_layer_ids: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        trust_remote_code: bool = False,
    ) -> Target:
        """Load a decoder-only causal LM from a folder or the Hub.

        Raises:
            ConfigError: there is none, or its logits are not those of its lm_head.
        """
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot load a causal language model from {path!r} ({error})",
                where="target.path",
                remedy="target.path=<folder or Hub id of a causal language model>",
            ) from error
        return cls(model.to(device), aux_layer_ids)

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, H]"""
        return self.model.get_output_embeddings().weight

    @property
    def embed_weight(self) -> Tensor:
        """[V, H]"""
        return self.model.get_input_embeddings().weight

    @property
    def last_layer(self) -> nn.Module:
        """The last decoder layer."""
        return self._layers[-1]

    @property
    def final_norm_weight(self) -> Tensor:
        """[H]: the norm between the last layer and lm_head."""
        return self.model.base_model.norm.weight

    @torch.no_grad()
    def states(self, input_ids: Tensor, attention_mask: Tensor, starts: Tensor | None = None) -> TargetStates:
        """Aux and final states of rows padded on the right; input_ids, attention_mask [B, T].

        starts [B, T]: where the row of a position begins in its line (packing). From positions that start anew
        transformers makes a mask that keeps rows apart, provided that it is given none; what padding says is not used.
        Aux id k is the residual stream that enters layer k = HF's `hidden_states[k]`, vLLM's convention too.
        """
        caught: dict[int, Tensor] = {}

        def catch(index: int):  # noqa: ANN202
            def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
                caught[index] = args[0] if args else kwargs["hidden_states"]

            return hook

        handles = [self._layers[k].register_forward_pre_hook(catch(k), with_kwargs=True) for k in self.aux_layer_ids]
        try:
            if starts is not None and bool(starts.any()):
                places = torch.arange(starts.shape[1], device=starts.device)
                asked = {"position_ids": places - starts}
            else:
                asked = {"attention_mask": attention_mask}
            out = self.model.base_model(input_ids=input_ids, use_cache=False, **asked)
        finally:
            for handle in handles:
                handle.remove()
        return TargetStates(torch.cat([caught[k] for k in self.aux_layer_ids], dim=-1), out.last_hidden_state)


def _decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of decoder layers, whatever the family calls it."""
    lists = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ConfigError(
            f"no list of {count} decoder layers in {type(model).__name__}",
            where="target.path",
            remedy="take a decoder-only language model",
        )
    return lists[0]


def _check_head(model: nn.Module, config: Any) -> None:
    """Refuse a target whose logits are not simply lm_head(last)."""
    changed = [k for k, neutral in LOGIT_CHANGERS.items() if getattr(config, k, None) not in (None, neutral)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        changed.append("lm_head.bias")
    if changed:
        raise ConfigError(
            f"the target changes its logits after lm_head ({', '.join(changed)})",
            where="target.path",
            remedy="take a target without it; such a draft would learn another distribution",
        )
