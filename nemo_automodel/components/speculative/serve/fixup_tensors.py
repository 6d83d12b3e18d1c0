# SPDX-License-Identifier: Apache-2.0
"""The tensor set: names as vLLM's loader wants them, every weight the layout needs, every shape as the config says.

vLLM (all of 0.14 to 0.33) neither reports a missing weight nor one it leaves at its initial value, so this must.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nemo_automodel.components.speculative.serve.ledger import Ledger
from nemo_automodel.components.speculative.serve.shards import read_bytes, same_bytes
from nemo_automodel.components.speculative.serve.types import Fixup, Resolved, ShardTensor
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease

FLOATS = ("F32", "F16", "BF16", "F64")
_UNUSED = re.compile(r"(^|\.)(rotary_emb\.((original_)?inv_freq|cos_cached|sin_cached)|rotary_pos_emb\.inv_freq)$")
# masks and counters that a model class or a trainer saved; without an effect on what a draft computes
_BUFFERS = re.compile(r"(^|\.)(position_ids|masked_bias|causal_mask|num_batches_tracked|global_step)$")
_WRAPPERS = ("model", "module", "_orig_mod", "draft_model")  # our layout, DDP's, torch.compile's, a trainer's whole
_VERIFIER = re.compile(r"^verifier_(lm_head|norm)\.")  # speculators' frozen copies of the target's, for training
_LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# vLLM's own packed parameters, which its loader takes from a file as they are
FUSED = {"self_attn.qkv_proj": _LINEARS[:3], "mlp.gate_up_proj": _LINEARS[4:6]}


@dataclass
class Names:
    """Exported name -> source tensor, and the source names that are left out."""

    kept: dict[str, ShardTensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    copied: set[str] = field(default_factory=set)  # those of `kept` whose source is exported under another name as well
    zeros: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # exported without a source
    rows: dict[str, int] = field(default_factory=dict)  # of which only the first rows are exported

    def has(self, name: str) -> bool:
        return name in self.kept

    def shape(self, name: str) -> tuple[int, ...] | None:
        """As exported; None when there is no such tensor in the source."""
        if name not in self.kept:
            return None
        shape = self.kept[name].info.shape
        return (self.rows[name], *shape[1:]) if name in self.rows else shape

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
    """The name in the export: no `model.` or other wrapper (vLLM adds its own), layer 0 by number, not `midlayer`."""
    name = source
    while (wrapper := name.partition(".")[0]) in _WRAPPERS and wrapper != name:
        name = name[len(wrapper) + 1 :]
    return "layers.0." + name[len("midlayer.") :] if name.startswith("midlayer.") else name


def plan_names(resolved: Resolved, ledger: Ledger) -> Names:
    """Rename every tensor; two different ones that would meet in one name are a problem."""
    names = Names()
    renamed = 0
    for tensor in resolved.tensors:
        name = exported_name(tensor.name)
        if name in names.kept:
            _meet(names.kept[name], tensor, name, names, ledger)
            continue
        names.kept[name] = tensor
        renamed += name != tensor.name
    for name in [name for name in names.kept if _UNUSED.search(name)]:
        names.leave_out(name, ledger, "computed, not trained; vLLM computes its own")
    for name in [name for name in names.kept if _BUFFERS.search(name) or _is_mask(name, names.kept[name])]:
        names.leave_out(name, ledger, "a buffer, which no weight of the draft depends on")
    if names.has("embed_tokens.bias"):
        ledger.warn("embeddings have no bias, and vLLM ignores one: it is left out", where="tensors")
        names.leave_out("embed_tokens.bias", ledger, "vLLM ignores it")
    for name in [name for name in names.kept if "t2d" in name and name != "t2d"]:
        names.leave_out(name, ledger, "vLLM skips every name with t2d in it")
    for name in [name for name in names.kept if _VERIFIER.search(name)]:
        names.leave_out(name, ledger, "the target's own weights, which only the trainer needs")
    if renamed:
        first = next(t.name for n, t in names.kept.items() if n != t.name)
        why = f"vLLM's loader puts `model.` before every name itself ({renamed} tensors)"
        ledger.changes.append(Fixup("tensor names", first, exported_name(first), why))
    return names


def _is_mask(name: str, tensor: ShardTensor) -> bool:
    """GPT-2's `attn.bias` is no bias, but the triangle of ones."""
    return name.endswith("attn.bias") and tensor.info.dtype in ("BOOL", "U8")


def _meet(first: ShardTensor, second: ShardTensor, name: str, names: Names, ledger: Ledger) -> None:
    """One weight that was saved under two names is kept once; two weights for one name are a problem."""
    if (first.info.dtype, first.info.shape) == (second.info.dtype, second.info.shape) and same_bytes(first, second):
        names.left_out.append(second.name)
        why = f"byte for byte {first.name}, under another name"
        ledger.changes.append(Fixup(f"tensor {second.name}", second.name, None, why))
        return
    found = f"{first.name} and {second.name} would both become {name}, and they differ"
    ledger.problem(found, where="tensors", remedy="keep one of the two")


def add_biases(ledger: Ledger, names: Names) -> None:
    """Where some linear layers have a bias and others of their kind have none, the others get one of zeros, which
    changes nothing.

    vLLM's llama_eagle3.py builds the biases of q, k, v and o from the one `attention_bias` and those of gate, up and
    down from `mlp_bias`, in every layer, and leaves what is missing uninitialised (Qwen2's form has q, k and v only).
    qwen3_eagle3.py builds q, k and v.
    """
    qk_norm = names.any_like(r"\.self_attn\.[qk]_norm\.weight$")
    groups = {"self_attn": (*_LINEARS[:3], "qkv_proj"), "mlp": () if qk_norm else (*_LINEARS[4:], "gate_up_proj")}
    groups["self_attn"] += () if qk_norm else ("o_proj",)
    for group, linears in groups.items():
        if not any(names.any_like(rf"{group}\.{linear}\.bias$") for linear in linears):
            continue
        made = []
        for name in (f"layers.{i}.{group}.{linear}" for i in range(names.layer_count()) for linear in linears):
            weight = names.kept.get(f"{name}.weight")
            if weight is not None and len(weight.info.shape) == 2 and not names.has(f"{name}.bias"):
                made.append(f"{name}.bias")
                names.zeros[made[-1]] = (weight.info.dtype, (weight.info.shape[0],))
        if made:
            why = "others of its kind have one: vLLM builds all of them and would leave this one uninitialised"
            ledger.changes.append(Fixup(f"tensor {made[0]}", None, f"zeros ({len(made)} in all)", why))


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
    plain = (*FLOATS, *_bare_fp8(ledger, names))
    quantised = sorted(t.name for n, t in names.kept.items() if t.info.dtype not in plain and n not in ("d2t", "t2d"))
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
            if _would_be_cut(name, names.shape(name), shape):
                found += " (vLLM would take its first rows without a word, whatever the others are for)"
            ledger.problem(found, where="tensors", remedy="make config.json and weights agree (sizes, heads, head_dim)")
    optional = {"mask_hidden", "d2t", "t2d", "embed_tokens.weight", "lm_head.weight"}
    spare = {f"layers.{i}.hidden_norm.weight" for i in range(1, names.layer_count())}
    unknown = sorted(
        names.kept[name].name for name in names.kept if name not in expected and name not in optional | spare
    )
    unknown = [name for name in unknown if not _idle_bias(ledger, names, name)]
    if unknown:
        shown = ", ".join(unknown[:6]) + (", ..." if len(unknown) > 6 else "")
        found = f"{len(unknown)} tensors that vLLM's EAGLE-3 model does not know: {shown}"
        ledger.problem(found, where="tensors", remedy="name a draft of the Llama or Qwen3 EAGLE-3 layout")


def _would_be_cut(name: str, shape: tuple[int, ...] | None, wanted: tuple[int, ...]) -> bool:
    part = name.endswith(tuple(f"{x}_proj.weight" for x in ("q", "k", "v", "gate", "up")))
    return part and shape is not None and len(shape) == 2 and shape[0] > wanted[0] and shape[1] == wanted[1]


def _bare_fp8(ledger: Ledger, names: Names) -> tuple[str, ...]:
    """Weights that were cast to 8 bits with no scale anywhere: vLLM casts them back, and they are what they say."""
    kind = "F8_E4M3"
    told = any(ledger.config.get(key) for key in ("quantization_config", "compression_config"))
    scaled = told or names.any_like(r"_scale(_inv)?$")
    if scaled or not any(tensor.info.dtype == kind for tensor in names.kept.values()):
        return ()
    ledger.warn(
        "there are weights of 8 bits (float8) and no scales: vLLM takes their values as they are", where="tensors"
    )
    return (kind,)


def _idle_bias(ledger: Ledger, names: Names, source: str) -> bool:
    """A bias that no vLLM class builds (its loader drops it without a word) is left out when it is all zeros."""
    name = next(name for name, tensor in names.kept.items() if tensor.name == source)
    tensor = names.kept[name]
    if not name.endswith(".bias") or len(tensor.info.shape) != 1 or any(read_bytes(tensor)):
        return False
    names.leave_out(name, ledger, "all zeros, and vLLM has no place for it")
    return True


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
        shapes.update(_layer_shapes(i, sizes, ledger, names))
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


def _layer_shapes(i: int, sizes: dict[str, int], ledger: Ledger, names: Names) -> dict[str, tuple[int, ...]]:
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
    for fused, parts in FUSED.items():
        if names.has(f"layers.{i}.{fused}.weight"):
            rows[fused.split(".")[1]] = sum(rows.pop(part) for part in parts)
            columns[fused.split(".")[1]] = wide if "qkv" in fused else hidden
    qk_norm = ledger.config.get("model_type") == "qwen3"
    for linear in rows:
        group = "self_attn" if linear in (*_LINEARS[:4], "qkv_proj") else "mlp"
        shapes[f"layers.{i}.{group}.{linear}.weight"] = (rows[linear], columns[linear])
        # llama_eagle3.py builds o_proj.bias too when attention_bias is set; qwen3_eagle3.py never does
        biased = ledger.config.get("attention_bias") and not (qk_norm and linear == "o_proj")
        if (group == "self_attn" and biased) or (group == "mlp" and ledger.config.get("mlp_bias") and not qk_norm):
            shapes[f"layers.{i}.{group}.{linear}.bias"] = (rows[linear],)
    if qk_norm:
        shapes |= {f"layers.{i}.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
    return shapes
