# SPDX-License-Identifier: Apache-2.0
"""What depends on the target, the release and the options: sizes against the target, K, slot budget, parallel sizes."""

from __future__ import annotations

from typing import Any

from nemo_automodel.components.speculative.draft.spec import RopeSpec
from nemo_automodel.components.speculative.serve.fixup_target import check_family
from nemo_automodel.components.speculative.serve.fixup_tensors import Names
from nemo_automodel.components.speculative.serve.ledger import Ledger
from nemo_automodel.components.speculative.serve.types import ServeSpec, TargetFacts
from nemo_automodel.components.speculative.serve.vllm_flags import full_flag
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease

FALLBACK_DEPTH = 3
MAX_DEPTH = 128  # MAX_SPEC_LEN in vllm/v1/sample/rejection_sampler.py, 0.32
_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
_DEPTH_KEYS = {True: ("num_depths",), False: ("ttt_steps", "ttt_length", "num_speculative_tokens")}
# (max_num_batched_tokens, max_num_seqs) that vLLM takes by itself on small and large GPUs, EngineArgs 0.17-0.27
_DEFAULT_BUDGETS = ((2048, 256), (8192, 1024))
_COUNTS = ("max-num-batched-tokens", "max-num-seqs")
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_CPU_BUDGET = (2048, 128)  # of the API server, times tensor_parallel_size (read in 0.26)


def check_target(ledger: Ledger, names: Names, target: TargetFacts | None, release: VllmRelease) -> None:
    """Hidden size against the target's; the target's family where the release keeps a list."""
    if target is None:
        return
    where, remedy = "serve.target", "serve the draft with the target it was trained for"
    hidden = ledger.config.get("hidden_size")
    takes = ledger.config.get("target_hidden_size") or hidden
    if takes != target.hidden_size:
        found = f"the draft takes hidden states of {takes}, the target's hidden_size is {target.hidden_size}"
        ledger.problem(found, where=where, remedy=remedy)
    if hidden != target.hidden_size and not names.has("embed_tokens.weight"):
        found = f"the draft's hidden_size is {hidden}, the target's {target.hidden_size}, and it has no embed_tokens"
        ledger.problem(found, where=where, remedy="save the draft again with its embeddings")
    check_family(ledger, target, release)


def choose_depth(ledger: Ledger, parallel: bool, spec: ServeSpec, recipe_depth: int | None) -> int:
    """K: what was asked for, else the trained depth (config.json, then the recipe's file), else 3 with a warning."""
    trained = next((v for k in _DEPTH_KEYS[parallel] if type(v := ledger.config.get(k)) is int and v > 0), None)
    if trained is None and not parallel:
        trained = recipe_depth
    asked = spec.num_speculative_tokens
    if (asked or trained or 0) > MAX_DEPTH:
        found = f"K={asked or trained} is above {MAX_DEPTH}, the most that vLLM's sampler takes"
        ledger.problem(found, where="serve.num_speculative_tokens", remedy=f"give {MAX_DEPTH} or fewer")
    if asked is not None and asked < 1:
        found = f"num_speculative_tokens is {asked}"
        ledger.problem(
            found, where="serve.num_speculative_tokens", remedy="give 1 or more, or null for the trained depth"
        )
        return 1
    if asked is None:
        if trained is None:
            ledger.warn(
                f"the draft does not say how deep it was trained: K={FALLBACK_DEPTH}",
                remedy="serve.num_speculative_tokens=N",
            )
        return trained or FALLBACK_DEPTH
    if trained is not None and asked > trained:
        found = f"K={asked} is above the trained depth {trained}: the positions beyond it will rarely be accepted"
        ledger.warn(found, where="serve.num_speculative_tokens")
    return asked


def check_release(ledger: Ledger, parallel: bool, release: VllmRelease) -> None:
    """P-EAGLE needs a release that drafts in parallel."""
    if parallel and not release.parallel_drafting:
        found = f"vLLM {release.version} cannot serve P-EAGLE (it ignores parallel_drafting without a word)"
        ledger.problem(found, where="serve.vllm.version", remedy="use vLLM >= 0.16", needs_newer_vllm=True)


def _check_dtype_and_length(ledger: Ledger, target: TargetFacts | None, spec: ServeSpec) -> None:
    """What vLLM's argument parser and model config refuse (config/model.py, 0.32), known before any loading."""
    if spec.dtype not in _DTYPES:
        ledger.problem(
            f"{spec.dtype!r} is no dtype of vLLM", where="serve.dtype", remedy=f"one of {', '.join(_DTYPES)}"
        )
    length = spec.max_model_len
    if length is not None and (length == 0 or length < -1):  # -1: vLLM's word for what fits
        found = f"max_model_len is {length}"
        ledger.problem(found, where="serve.max_model_len", remedy="give 1 or more, or null for the target's")
    if target is None or length is None or "VLLM_ALLOW_LONG_MAX_MODEL_LEN" in spec.env:
        return
    # a scaled rope or a tokenizer's own limit may stretch the target: there vLLM is left to judge
    if RopeSpec.from_config(target.config).scaling is None and length > target.max_position_embeddings:
        ledger.problem(
            f"max_model_len is {length}, the target reaches {target.max_position_embeddings}",
            where="serve.max_model_len",
            remedy=f"serve.max_model_len={target.max_position_embeddings} or less",
        )


def check_options(
    ledger: Ledger, parallel: bool, depth: int, release: VllmRelease, target: TargetFacts | None, spec: ServeSpec
) -> None:
    """What depends on the server's options alone: parallel sizes, method, and P-EAGLE's room in the scheduler."""
    _check_dtype_and_length(ledger, target, spec)
    _check_parallel_sizes(ledger, target, spec)
    _check_counts(ledger, release, spec)
    _check_cpu_heads(ledger, release)
    _check_method(ledger, parallel, spec)
    if not (parallel and release.parallel_drafting):
        return
    if spec.extra_args.get("disable_padded_drafter_batch"):
        ledger.problem(
            "disable_padded_drafter_batch is set", where="serve.extra_args", remedy="P-EAGLE needs it off: remove it"
        )
    _check_budget(ledger, depth, release, spec)


def _check_budget(ledger: Ledger, depth: int, release: VllmRelease, spec: ServeSpec) -> None:
    """0.17-0.27 set (K-1) x max_num_seqs aside from max_num_batched_tokens; later ones only K-1 (config/vllm.py).

    What the options leave open vLLM chooses by the GPU: only what fails on every kind is a problem.
    """
    tokens, seqs = (_count(spec, release, flag) for flag in _COUNTS)
    where = "serve.extra_args"
    if release.slot_budget == "per_step":
        if tokens is not None and tokens <= depth - 1:
            found = f"max_num_batched_tokens={tokens} leaves no room for K={depth}"
            ledger.problem(found, where=where, remedy=f"give more than {depth - 1}")
        return
    if release.slot_budget != "per_sequence":
        return
    ranks = spec.tensor_parallel_size
    defaults = ((_CPU_BUDGET[0] * ranks, _CPU_BUDGET[1] * ranks),) if release.cpu else _DEFAULT_BUDGETS
    budgets = [(tokens or own_tokens, seqs or own_seqs) for own_tokens, own_seqs in defaults]
    full = [(budget, rows) for budget, rows in budgets if (depth - 1) * rows >= budget]
    if not full:
        return
    budget, rows = full[0]
    found = f"vLLM {release.version} sets (K-1) x max_num_seqs = {depth - 1} x {rows} of {budget} tokens aside"
    remedy = f"+serve.extra_args.max_num_seqs={min(max(1, (budget - 1) // (depth - 1)), 64)}, or a smaller K"
    if len(full) == len(budgets):
        ledger.problem(found, where=where, remedy=remedy)
    else:  # vLLM chooses what is not given by the GPU, which is not known here
        ledger.warn(
            f"{found} where those are its defaults for the GPU, and would not start", where=where, remedy=remedy
        )


def _check_cpu_heads(ledger: Ledger, release: VllmRelease) -> None:
    """The attention of vLLM for CPU knows some head sizes only (`v1/attention/backends/cpu_attn.py`: the same list in
    0.22, 0.24, 0.26, 0.28, 0.30 to 0.33; a draft of 16 was run in 0.32: "Unsupported CPU attention configuration")."""
    head = ledger.config.get("head_dim")
    if release.cpu and type(head) is int and head not in _CPU_HEADS:
        takes = ", ".join(map(str, _CPU_HEADS))
        found = f"head_dim is {head}; the attention of vLLM for CPU takes {takes}"
        ledger.problem(found, remedy="serve this draft on a GPU")


def _check_counts(ledger: Ledger, release: VllmRelease, spec: ServeSpec) -> None:
    """Both are `ge=1` for vLLM (config/scheduler.py, 0.32), and want a value."""
    for flag in _COUNTS:
        value, count = _given(spec, release, flag), _count(spec, release, flag)
        if isinstance(value, bool) or (count is not None and count < 1):
            found = f"--{flag} {'has no value' if isinstance(value, bool) else f'is {count}'}"
            key = flag.replace("-", "_")
            ledger.problem(found, where=f"serve.extra_args.{key}", remedy="give 1 or more, or leave it out")


def _given(spec: ServeSpec, release: VllmRelease, flag: str) -> Any:
    """What `serve.extra_args` gives for a flag, however it is spelled or cut short; argparse takes the last."""
    spelled = {full_flag(str(k).lstrip("-").replace("_", "-"), release.version): v for k, v in spec.extra_args.items()}
    return spelled.get(flag)


def _count(spec: ServeSpec, release: VllmRelease, flag: str) -> int | None:
    value = _given(spec, release, flag)
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return None  # vLLM's own parser also knows "8k"; it judges those itself


def _check_parallel_sizes(ledger: Ledger, target: TargetFacts | None, spec: ServeSpec) -> None:
    """The draft is always built with the target's TP group (report 2.2), so its sizes must divide by it."""
    tp, draft_tp = spec.tensor_parallel_size, spec.draft_tensor_parallel_size
    where = "serve.tensor_parallel_size"
    if tp < 1:
        ledger.problem(f"tensor_parallel_size is {tp}", where=where, remedy="give 1 or more")
        return
    if draft_tp is not None and draft_tp not in (1, tp):
        found = f"draft_tensor_parallel_size is {draft_tp}, vLLM takes 1 or {tp}"
        ledger.problem(found, where="serve.draft_tensor_parallel_size", remedy="leave it at null")
    owners = [("draft", ledger.config)] + ([("target", vars(target) | dict(target.config))] if target else [])
    for owner, config in owners:
        for key in (
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
            "draft_vocab_size",
        ):
            size = config.get(key)
            if type(size) is int and size > 0 and not _divides(key, size, tp):
                ledger.problem(
                    f"{tp} does not divide the {owner}'s {key} {size}", where=where, remedy="give a size that does"
                )


def _divides(key: str, size: int, tp: int) -> bool:
    if key == "num_key_value_heads":
        return size % tp == 0 or tp % size == 0  # fewer heads than ranks are replicated
    if key.endswith("vocab_size"):
        return (size + 63) // 64 * 64 % tp == 0  # vLLM pads vocabularies to 64 (vocab_parallel_embedding.py)
    return size % tp == 0


def _check_method(ledger: Ledger, parallel: bool, spec: ServeSpec) -> None:
    """An override may name what the draft is (`eagle3` is vLLM's name for both kinds), nothing else."""
    fitting = ("eagle3", "peagle") if parallel else ("eagle3",)
    if spec.method is not None and spec.method not in fitting:
        kind = "P-EAGLE" if parallel else "EAGLE-3"
        found = f"method is {spec.method}, the draft is {kind}"
        ledger.problem(found, where="serve.method", remedy=f"leave it at null, or {fitting[0]}")
