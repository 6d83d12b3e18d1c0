# SPDX-License-Identifier: Apache-2.0
"""The tensor set: names as vLLM's loader wants them, every weight the layout needs, every shape as the config says.

vLLM (all of 0.14 to 0.33) neither reports a missing weight nor one it leaves at its initial value, so this must.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nemo_automodel.components.speculative.serve.ledger import Ledger
from nemo_automodel.components.speculative.serve.types import Fixup, Resolved, ShardTensor
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease

FLOATS = ("F32", "F16", "BF16", "F64")
_UNUSED = re.compile(r"\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|rotary_pos_emb\.inv_freq)$")
_LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Names:
    """Exported name -> source tensor, and the source names that are left out."""

    kept: dict[str, ShardTensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    copied: set[str] = field(default_factory=set)  # those of `kept` whose source is exported under another name as well
    zeros: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # exported without a source

    def has(self, name: str) -> bool:
        return name in self.kept

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.kept[name].info.shape if name in self.kept else None

    def any_like(self, pattern: str) -> bool:
        return any(re.search(pattern, name) for name in self.kept)

    def layer_count(self) -> int:
        """Layers in the weights; vLLM builds as many as the config says and leaves surplus ones uninitialised."""
        found = [int(match[1]) for name in self.kept if (match := _LAYER.match(name))]
        return max(found) + 1 if found else 0

    def leave_out(self, name: str, ledger: Ledger, why: str) -> None:
        source = self.kept.pop(name).name
        self.left_out.append(source)
        ledger.changes.append(Fixup(f"tensor {source}", source, None, why))

    def renames(self) -> dict[str, str]:
        return {tensor.name: name for name, tensor in self.kept.items() if name not in self.copied}

    def copies(self) -> dict[str, str]:
        return {name: self.kept[name].name for name in sorted(self.copied)}

    def dropped(self) -> tuple[str, ...]:
        return tuple(sorted(self.left_out))


def exported_name(source: str) -> str:
    """The name in the export: no `model.` wrapper (vLLM adds it unasked), layer 0 by number instead of `midlayer`."""
    name = source
    while name.startswith("model."):
        name = name[len("model.") :]
    return "layers.0." + name[len("midlayer.") :] if name.startswith("midlayer.") else name


def plan_names(resolved: Resolved, ledger: Ledger) -> Names:
    """Rename every tensor; two sources that would meet in one name are a problem."""
    names = Names()
    renamed = 0
    for tensor in resolved.tensors:
        name = exported_name(tensor.name)
        if name in names.kept:
            other = names.kept[name].name
            ledger.problem(
                f"{other} and {tensor.name} would both become {name}", where="tensors", remedy="keep one of the two"
            )
            continue
        names.kept[name] = tensor
        renamed += name != tensor.name
    for name in [name for name in names.kept if _UNUSED.search(name)]:
        names.leave_out(name, ledger, "computed, not trained; vLLM computes its own")
    if renamed:
        first = next(t.name for n, t in names.kept.items() if n != t.name)
        why = f"vLLM's loader puts `model.` before every name itself ({renamed} tensors)"
        ledger.changes.append(Fixup("tensor names", first, exported_name(first), why))
    return names


def add_output_biases(ledger: Ledger, names: Names) -> None:
    """Layers with biases on q, k and v and none on `o_proj` (Qwen2's form) get one of zeros, which changes nothing.

    vLLM's llama_eagle3.py builds all four from `attention_bias` and leaves the one that is missing uninitialised.
    """
    if names.any_like(r"\.self_attn\.([qk]_norm\.weight|o_proj\.bias)$"):
        return  # the Qwen3 form builds none; one that only some layers have is missing in the others
    made = []
    for i in range(names.layer_count()):
        stem = f"layers.{i}.self_attn"
        output = names.kept.get(f"{stem}.o_proj.weight")
        if output is not None and len(output.info.shape) == 2 and names.has(f"{stem}.q_proj.bias"):
            made.append(f"{stem}.o_proj.bias")
            names.zeros[made[-1]] = (output.info.dtype, (output.info.shape[0],))
    if made:
        why = "q, k and v have biases, o_proj has none: vLLM builds one with them and would leave it uninitialised"
        ledger.changes.append(Fixup(f"tensor {made[0]}", None, f"zeros ({len(made)} layers)", why))


def fix_mask_hidden(ledger: Ledger, names: Names, parallel: bool, release: VllmRelease) -> None:
    """P-EAGLE needs the learnable `mask_hidden`, three (number of aux layers) target hidden states wide."""
    if not parallel:
        if names.has("mask_hidden"):
            ledger.warn(
                "mask_hidden is there, but the config does not say parallel_drafting=true with a mask token: served as "
                "sequential EAGLE-3, far below what a P-EAGLE draft can do",
                remedy="if it is one, write parallel_drafting=true and its mask_token_id into config.json",
            )
            names.leave_out("mask_hidden", ledger, "only parallel drafting reads it")
        return
    tensor = names.kept.get("mask_hidden")
    if tensor is None:
        remedy = "export the draft again with its mask_hidden, or set parallel_drafting=false in its config.json"
        ledger.problem("parallel_drafting is set, but there is no mask_hidden tensor", where="tensors", remedy=remedy)
        return
    hidden, wide = ledger.config.get("hidden_size"), ledger.config.get("target_hidden_size")
    fc = names.shape("fc.weight")
    if fc is not None and len(fc) == 2 and tensor.info.numel != fc[1]:
        found = f"mask_hidden has {tensor.info.numel} elements, fc.weight takes {fc[1]}"
        ledger.problem(
            found, where="tensors", remedy="export the draft again: mask_hidden is the input of fc, before it"
        )
    if wide not in (None, hidden) and not release.mask_hidden_by_target_size:
        found = (
            f"mask_hidden follows target_hidden_size={wide}, vLLM {release.version} sizes it by hidden_size={hidden}"
        )
        ledger.problem(found, remedy="use vLLM >= 0.22", needs_newer_vllm=True)


def check_weights(ledger: Ledger, names: Names) -> None:
    """Every weight the layout needs is there in its shape; no weight vLLM does not know; plain floats only."""
    quantised = sorted(t.name for n, t in names.kept.items() if t.info.dtype not in FLOATS and n not in ("d2t", "t2d"))
    if quantised:
        found = f"{len(quantised)} tensors are not plain floats ({quantised[0]})"
        ledger.problem(found, where="tensors", remedy="serve an unquantised draft")
    expected = _expected_shapes(ledger, names)
    if expected is None:
        return
    missing = sorted(name for name in expected if name not in names.kept and name not in names.zeros)
    if missing:
        shown = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
        found = f"missing, and vLLM would not say so: {shown} ({len(missing)} in all)"
        ledger.problem(found, where="tensors", remedy="save the draft again, with all its weights")
    for name, shape in expected.items():
        if name in names.kept and names.shape(name) != shape:
            found = f"{names.kept[name].name} is {list(names.shape(name))}, the config says {list(shape)}"
            ledger.problem(found, where="tensors", remedy="make config.json and weights agree (sizes, heads, head_dim)")
    optional = {"mask_hidden", "d2t", "t2d", "embed_tokens.weight", "lm_head.weight"}
    spare = {f"layers.{i}.hidden_norm.weight" for i in range(1, names.layer_count())}
    unknown = sorted(
        names.kept[name].name for name in names.kept if name not in expected and name not in optional | spare
    )
    if unknown:
        shown = ", ".join(unknown[:6]) + (", ..." if len(unknown) > 6 else "")
        found = f"{len(unknown)} tensors that vLLM's EAGLE-3 model does not know: {shown}"
        ledger.problem(found, where="tensors", remedy="name a draft of the Llama or Qwen3 EAGLE-3 layout")


def _expected_shapes(ledger: Ledger, names: Names) -> dict[str, tuple[int, ...]] | None:
    """Exported name -> shape, from the config; None when a size is missing (already a problem)."""
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    keys += ("vocab_size", "draft_vocab_size")
    sizes = {key: ledger.number(key) for key in keys}
    if None in sizes.values():
        return None
    hidden = sizes["hidden_size"]
    target_hidden = ledger.config.get("target_hidden_size") or hidden
    ids = ledger.config.get("eagle_aux_hidden_state_layer_ids")
    aux = len(ids) if isinstance(ids, list) and ids else 3
    fc_in = aux * target_hidden
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, fc_in), "norm.weight": (hidden,)}
    for i in range(names.layer_count()):
        shapes.update(_layer_shapes(i, sizes, ledger))
    if ledger.config.get("fc_norm"):
        shapes.update({f"fc_norm.{i}.weight": (target_hidden,) for i in range(aux)})
    if ledger.config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (fc_in,)
    if names.has("embed_tokens.weight") or target_hidden != hidden:
        shapes["embed_tokens.weight"] = (sizes["vocab_size"], hidden)
    reduced = sizes["draft_vocab_size"] != sizes["vocab_size"]
    if names.has("lm_head.weight") or reduced or target_hidden != hidden:
        shapes["lm_head.weight"] = (sizes["draft_vocab_size"], hidden)
    return shapes


def _layer_shapes(i: int, sizes: dict[str, int], ledger: Ledger) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    wide = 2 * hidden if i == 0 else hidden  # layer 0 reads [norm(embed), norm(hidden)]
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    rows |= {"gate_proj": inner, "up_proj": inner, "down_proj": hidden}
    columns = {"q_proj": wide, "k_proj": wide, "v_proj": wide, "o_proj": queries}
    columns |= {"gate_proj": hidden, "up_proj": hidden, "down_proj": inner}
    shapes: dict[str, tuple[int, ...]] = {f"layers.{i}.{norm}.weight": (hidden,) for norm in _NORMS}
    if i == 0:
        shapes["layers.0.hidden_norm.weight"] = (hidden,)
    qk_norm = ledger.config.get("model_type") == "qwen3"
    for linear in _LINEARS:
        group = "self_attn" if linear in _LINEARS[:4] else "mlp"
        shapes[f"layers.{i}.{group}.{linear}.weight"] = (rows[linear], columns[linear])
        # llama_eagle3.py builds o_proj.bias too when attention_bias is set; qwen3_eagle3.py never does
        biased = ledger.config.get("attention_bias") and not (qk_norm and linear == "o_proj")
        if (group == "self_attn" and biased) or (group == "mlp" and ledger.config.get("mlp_bias") and not qk_norm):
            shapes[f"layers.{i}.{group}.{linear}.bias"] = (rows[linear],)
    if qk_norm:
        shapes |= {f"layers.{i}.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
    return shapes
