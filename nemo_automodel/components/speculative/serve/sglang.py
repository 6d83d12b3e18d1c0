# SPDX-License-Identifier: Apache-2.0
"""`serve/engine=sglang`: an EAGLE-3 draft under SGLang. Nothing here has been run: SGLang's kernels on PyPI want CUDA.

The flags were held against the wheel of 0.5.23. Read in SGLang's `srt/models/llama_eagle3.py`,
`srt/model_executor/model_runner.py`, `srt/server_args.py` and `srt/speculative/eagle_worker.py` (2025 to 2026), where
it differs from vLLM:
- the first layer is called `midlayer`; releases from before pull request 24663 (May 2026) skip `layers.0.*` without a
  word and draft with random weights. Later ones take both names, and more than one layer;
- aux layers are read from `eagle_config`, and id k there is the output of layer k: vLLM's id less one;
- the token map of EAGLE-3 is the draft's own `d2t`. `--speculative-token-map` belongs to EAGLE-2 (FR-Spec): with EAGLE3
  it is ignored with a warning. A file that NeMo Automodel left beside the draft is passed on all the same;
- the draft's embeddings are replaced by the target's when the hidden sizes agree;
- with topk 1, `num_draft_tokens` is `num_steps` + 1: K drafted tokens are K steps.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

from nemo_automodel.components.speculative.serve.command import extra_flags, launch_environment
from nemo_automodel.components.speculative.serve.export_plan import EXPORT_DIR, ExportPlan
from nemo_automodel.components.speculative.serve.types import Fixup, Fixups, LaunchCommand, RuntimeKind, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import (
    ResolvedRelease,
    VllmRelease,
    find_distribution,
    known_minors,
    release_for,
)
from nemo_automodel.errors import ConfigError, FixupError, VllmMissingError

MODULE = "sglang.launch_server"
SGLANG_EXPORT_DIR = "sglang_export"
TOKEN_MAP = "speculative_token_map.pt"  # NeMo Automodel's name
NEWER = "needs an SGLang from after May 2026 (pull request 24663)"
MANAGED = {
    **dict.fromkeys(("model", "model-path"), "serve.target"),
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size"), "serve.tensor_parallel_size"),
    **dict.fromkeys(("speculative-algorithm", "speculative-algo"), "serve.checkpoint"),
    **dict.fromkeys(("speculative-draft-model-path", "speculative-draft-model"), "serve.checkpoint"),
    **dict.fromkeys(("speculative-num-steps", "speculative-num-draft-tokens"), "serve.num_speculative_tokens"),
    "host": "serve.host",
    "port": "serve.port",
    "dtype": "serve.dtype",
    "mem-fraction-static": "serve.gpu_memory_utilization",
    "context-length": "serve.max_model_len",
    "trust-remote-code": "serve.trust_remote_code",
    "served-model-name": "serve.served_model_name",
}

INSTEAD = {"max-num-seqs": "max_running_requests", "enforce-eager": "disable_cuda_graph"}  # vLLM's flag -> SGLang's


def refuse_options(spec: ServeSpec) -> None:
    """Raises ConfigError: options that have no meaning under SGLang."""
    if spec.benchmark_mode and not spec.print_only:
        raise ConfigError(
            "SGLang keeps none of the counters that acceptance is measured with",
            where="serve.mode=benchmark",
            remedy="serve.mode=foreground, or serve.engine=vllm to measure",
        )
    if spec.runtime.kind is not RuntimeKind.here:
        raise ConfigError(
            f"serve/runtime={spec.runtime.kind.value} brings vLLM",
            where="serve.engine=sglang",
            remedy="install sglang and name its interpreter: serve.python=PATH",
        )
    if spec.draft_tensor_parallel_size is not None:
        raise ConfigError(
            "SGLang has no size of its own for the draft",
            where="serve.draft_tensor_parallel_size",
            remedy="leave it out",
        )


def refuse_peagle() -> None:
    """Raises FixupError: SGLang drafts one token at a time."""
    raise FixupError(
        "SGLang cannot serve a P-EAGLE draft: it does not draft in parallel",
        where="serve.engine=sglang",
        remedy="serve.engine=vllm (0.16 or newer)",
    )


def resolve_sglang(spec: ServeSpec) -> ResolvedRelease:
    """The newest vLLM facts, whose export SGLang's is made from. `installed` is None: vLLM has no part in it.

    Raises:
        ConfigError: no usable interpreter.
        VllmMissingError: there is no SGLang (exit code 2; launch only).
    """
    found = find_distribution(spec.python, ("sglang",))
    python = spec.python or sys.executable
    release = release_for(known_minors()[-1])
    if found is None and not spec.print_only:
        raise VllmMissingError(
            f"SGLang is not installed in {python}",
            where="serve.python",
            remedy="pip install sglang in an environment of its own, and name it: serve.python=PATH",
        )
    told = f"SGLang {found[1]} in {python}" if found else f"no SGLang in {python}"
    return ResolvedRelease(release, None, False, (f"{told}: its launch has been read, not run, by the makers of this",))


def plan_sglang(fixups: Fixups) -> Fixups:
    """The plan for vLLM, turned into SGLang's names and keys; pure.

    Raises:
        FixupError: a P-EAGLE draft, or one with parts that SGLang's EAGLE-3 does not have.
    """
    if fixups.parallel_drafting:
        refuse_peagle()
    config = dict(fixups.config)
    _refuse_parts(config)
    changes, warnings = list(fixups.changes), list(fixups.warnings)
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        ours = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [k - 1 for k in ids]}
        config["eagle_config"] = {**(config.get("eagle_config") or {}), **ours}
        why = f"SGLang counts the outputs of layers: {ids} in vLLM's counting"
        changes.append(Fixup("eagle_config", None, config["eagle_config"], why))
    renames = {source: _midlayer(name) for source, name in fixups.renames.items()}
    changes.append(Fixup("tensors", "layers.0.*", "midlayer.*", "the only name that every SGLang loads"))
    warnings += _warnings(config, set(renames.values()))
    copies = {_midlayer(name): source for name, source in fixups.copies.items()}
    return replace(
        fixups, config=config, changes=tuple(changes), renames=renames, copies=copies, warnings=tuple(warnings)
    )


def _midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _refuse_parts(config: Mapping[str, Any]) -> None:
    problems = []
    if config.get("architectures") != ["LlamaForCausalLMEagle3"]:
        problems.append(f"the draft is a {config.get('architectures')} (layers with q_norm and k_norm)")
    if config.get("attention_bias"):
        problems.append("the draft's attention has biases, which are left out without a word")
    if problems:
        raise FixupError(
            f"SGLang's EAGLE-3 cannot serve this: {'; '.join(problems)}",
            where="serve.engine=sglang",
            remedy="serve.engine=vllm",
        )


def _warnings(config: Mapping[str, Any], names: set[str]) -> list[str]:
    found = []
    if config.get("num_hidden_layers", 1) > 1:
        found.append(f"a draft of {config['num_hidden_layers']} layers {NEWER}; older ones refuse it")
    if newer := [key for key in ("fc_norm", "norm_output", "norm_before_fc") if config.get(key)]:
        found.append(f"{', '.join(newer)} {NEWER}; older ones ignore it and accept little")
    if config.get("norm_before_residual"):
        found.append("norm_before_residual is not in the SGLang that was read: acceptance may be low")
    if "embed_tokens.weight" in names:
        found.append("SGLang takes the target's embeddings in place of the draft's: no loss where they are equal")
    return found


def sglang_dest(plan: ExportPlan) -> ExportPlan:
    """The same export in a folder of its own, beside vLLM's."""
    name = SGLANG_EXPORT_DIR if plan.dest.name == EXPORT_DIR else f"{plan.dest.name}-sglang"
    dest = plan.dest.with_name(name)
    return replace(plan, dest=dest, notes=tuple(note.replace(str(plan.dest), str(dest)) for note in plan.notes))


def build_sglang_command(
    exported_dir: Path,
    fixups: Fixups,
    spec: ServeSpec,
    release: VllmRelease,
    port: int,
    *,
    model_dir: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> LaunchCommand:
    """`python -m sglang.launch_server ...`; `model_dir` is where a token map file would lie. Pure.

    Raises:
        ConfigError: a managed or unusable flag in `serve.extra_args`, a secret or bad name in `serve.env`.
    """
    k = fixups.num_speculative_tokens
    argv = [spec.python or sys.executable, "-m", MODULE, "--model-path", spec.target]
    argv += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(exported_dir)]
    argv += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
    argv += ["--speculative-num-draft-tokens", str(k + 1)]
    if model_dir is not None and (model_dir / TOKEN_MAP).is_file():
        argv += ["--speculative-token-map", str(model_dir / TOKEN_MAP)]
    argv += ["--host", spec.host, "--port", str(port), "--tp-size", str(spec.tensor_parallel_size)]
    argv += ["--dtype", spec.dtype, "--mem-fraction-static", str(spec.gpu_memory_utilization)]
    if spec.max_model_len is not None:
        argv += ["--context-length", str(spec.max_model_len)]
    if spec.trust_remote_code:
        argv.append("--trust-remote-code")
    argv += ["--served-model-name", spec.served_model_name or spec.target]
    argv += _extra(spec, release)
    env, unset = launch_environment(spec, release, os.environ if environ is None else environ)
    return LaunchCommand(tuple(argv), env, unset)


def _extra(spec: ServeSpec, release: VllmRelease) -> list[str]:
    for key, value in spec.extra_args.items():
        flag = str(key).lstrip("-").replace("_", "-")
        if flag in INSTEAD:
            raise ConfigError(
                f"--{flag} is vLLM's",
                where=f"serve.extra_args.{key}",
                remedy=f"~serve.extra_args.{key}, and +serve.extra_args.{INSTEAD[flag]}={value} if it is wanted",
            )
        if value is False:  # SGLang's switches have no --no- form
            raise ConfigError(f"{key} is false", where=f"serve.extra_args.{key}", remedy="leave it out")
    return extra_flags(spec.extra_args, release, MANAGED)


def sglang_warnings(spec: ServeSpec) -> tuple[str, ...]:
    """What a careful reader of the command would ask about."""
    if spec.host in ("localhost", "::1") or spec.host.startswith("127."):
        return ()
    return (f"serve.host={spec.host} lets other machines ask without a key: put a proxy that asks for one before it",)
