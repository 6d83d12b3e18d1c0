# SPDX-License-Identifier: Apache-2.0
"""Plan what must change so that the chosen vLLM serves this draft as it was trained. Reads at most `d2t` and `t2d`."""

from __future__ import annotations

from nemo_automodel.components.speculative.serve import fixup_config as config
from nemo_automodel.components.speculative.serve import fixup_rope as rope
from nemo_automodel.components.speculative.serve import fixup_serving as serving
from nemo_automodel.components.speculative.serve import fixup_tensors as tensors
from nemo_automodel.components.speculative.serve import fixup_vocab as vocab
from nemo_automodel.components.speculative.serve.ledger import Ledger
from nemo_automodel.components.speculative.serve.types import Fixups, Resolved, ServeSpec, TargetFacts
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease


def plan_fixups(
    resolved: Resolved,
    release: VllmRelease,
    target: TargetFacts | None,
    spec: ServeSpec,
    *,
    exporting: bool = False,
) -> Fixups:
    """The config to write, the renames and what is left out; or every problem at once.

    The plain format with `LlamaForCausalLMEagle3` loads in every vLLM from 0.14 to 0.33 (read in their
    `vllm/model_executor/models/llama_eagle3.py`), so there is one export and no per-release one. With `target=None`
    (printing, offline) the checks against the target are skipped; with `exporting` those of options that only a server
    has (parallel sizes, method, room in the scheduler), which leave the export as it is.

    Raises:
        FixupError: the draft cannot be served; all reasons in one line.
        VllmMissingError: one of the reasons is that the chosen vLLM is too old for it (exit code 2).
    """
    ledger = Ledger(dict(resolved.config))
    names = tensors.plan_names(resolved, ledger)
    parallel = config.read_kind(ledger, names)
    config.un_nest_speculators(ledger)
    config.fix_shape_keys(ledger, names)
    config.fix_architecture(ledger, names, release)
    config.fix_features(ledger, names, release)
    rope.fix_positions(ledger, target, spec)
    config.fix_mask_token(ledger, parallel)
    config.fix_aux_layers(ledger, target, release)
    vocab.untie(ledger, names)
    vocab.fix_vocabulary(ledger, names)
    tensors.fix_mask_hidden(ledger, names, parallel, release)
    tensors.check_weights(ledger, names)
    config.clean(ledger, names)
    serving.check_target(ledger, names, target, release)
    depth = serving.choose_depth(ledger, parallel, spec, resolved.recipe_depth)
    serving.check_release(ledger, parallel, release)
    if not exporting:
        serving.check_options(ledger, parallel, depth, release, target, spec)
    ledger.raise_problems(str(resolved.model_dir))
    return Fixups(
        config=dict(ledger.config),
        changes=tuple(ledger.changes),
        renames=names.renames(),
        dropped=names.dropped(),
        warnings=tuple(ledger.warnings),
        parallel_drafting=parallel,
        num_speculative_tokens=depth,
        copies=names.copies(),
    )
