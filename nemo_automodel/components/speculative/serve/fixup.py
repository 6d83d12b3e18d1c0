# SPDX-License-Identifier: Apache-2.0
"""Plan what must change so that the chosen vLLM serves this draft as it was trained. Reads little: `d2t`,
`t2d`, biases without a place and, where vocabularies differ in size, the target's tokenizer.json."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_automodel.components.speculative.serve import fixup_config as config
from nemo_automodel.components.speculative.serve import fixup_rope as rope
from nemo_automodel.components.speculative.serve import fixup_serving as serving
from nemo_automodel.components.speculative.serve import fixup_sizes as sizes
from nemo_automodel.components.speculative.serve import fixup_tensors as tensors
from nemo_automodel.components.speculative.serve import fixup_vocab as vocab
from nemo_automodel.components.speculative.serve.fixup_family import check_draft_family
from nemo_automodel.components.speculative.serve.fixup_padding import fix_padding
from nemo_automodel.components.speculative.serve.fixup_target import check_multimodal
from nemo_automodel.components.speculative.serve.fixup_written import read_as_meant
from nemo_automodel.components.speculative.serve.ledger import Caution, Ledger, Problem, raise_problems
from nemo_automodel.components.speculative.serve.replay import check_replay
from nemo_automodel.components.speculative.serve.types import Fixup, Fixups, Resolved, ServeSpec, TargetFacts
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease


@dataclass(frozen=True)
class Examination:
    """All that was found about one draft: why it cannot be served, what to be careful about, what the export mends."""

    problems: tuple[Problem, ...]
    cautions: tuple[Caution, ...]
    changes: tuple[Fixup, ...]
    plan: Fixups | None  # None exactly when there are problems

    def require(self, place: str) -> Fixups:
        """The plan.

        Raises:
            FixupError: the draft cannot be served; all reasons in one line.
            VllmMissingError: one of the reasons is that the chosen vLLM is too old for it (exit code 2).
        """
        raise_problems(self.problems, place)
        assert self.plan is not None
        return self.plan


def plan_fixups(
    resolved: Resolved,
    release: VllmRelease,
    target: TargetFacts | None,
    spec: ServeSpec,
    *,
    exporting: bool = False,
) -> Fixups:
    """The config to write, the renames and what is left out; or every problem at once (see `examine`).

    Raises:
        FixupError: the draft cannot be served; all reasons in one line.
        VllmMissingError: one of the reasons is that the chosen vLLM is too old for it (exit code 2).
    """
    return examine(resolved, release, target, spec, exporting=exporting).require(str(resolved.model_dir))


def examine(
    resolved: Resolved,
    release: VllmRelease,
    target: TargetFacts | None,
    spec: ServeSpec,
    *,
    exporting: bool = False,
) -> Examination:
    """Everything that is found, whether or not the draft can be served; raises nothing.

    The plain format with `LlamaForCausalLMEagle3` loads in every vLLM from 0.14 to 0.33 (read in their
    `vllm/model_executor/models/llama_eagle3.py`), so there is one export and no per-release one. With `target=None`
    (printing, offline) the checks against the target are skipped; with `exporting` those of options that only a server
    has (parallel sizes, method, room in the scheduler), which leave the export as it is.
    """
    ledger = Ledger(dict(resolved.config))
    names = tensors.plan_names(resolved, ledger)
    if not check_draft_family(ledger, names):  # what follows would judge it by another layout's rules
        return _examination(ledger, None)
    read_as_meant(ledger)
    parallel = config.read_kind(ledger, names)
    config.un_nest_speculators(ledger)
    read_as_meant(ledger)  # what was nested, too
    sizes.check_types(ledger)
    sizes.fix_sizes(ledger, names, target)
    fix_padding(ledger, names, target)
    config.fix_architecture(ledger, names, release)
    config.fix_features(ledger, names, release)
    rope.fix_positions(ledger, target, spec, parallel=parallel)
    config.fix_mask_token(ledger, parallel)
    config.fix_aux_layers(ledger, target, release)
    vocab.untie(ledger, names)
    vocab.fix_vocabulary(ledger, names, target)
    tensors.fix_mask_hidden(ledger, names, parallel, release)
    tensors.check_weights(ledger, names)
    sizes.drop_idle(ledger)
    config.clean(ledger, names)
    serving.check_target(ledger, names, target, release)
    depth = serving.choose_depth(ledger, parallel, spec, resolved.recipe_depth)
    serving.check_release(ledger, parallel, release)
    check_multimodal(ledger, parallel, target, release)
    if not exporting:
        serving.check_options(ledger, parallel, depth, release, target, spec)
    if not ledger.problems:
        check_replay(ledger, names, parallel, target)
    return _examination(ledger, _fixups(ledger, names, parallel, depth))


def _examination(ledger: Ledger, plan: Fixups | None) -> Examination:
    problems = tuple(ledger.problems)
    return Examination(problems, tuple(ledger.cautions), tuple(ledger.changes), None if problems else plan)


def _fixups(ledger: Ledger, names: tensors.Names, parallel: bool, depth: int) -> Fixups:
    return Fixups(
        config=dict(ledger.config),
        changes=tuple(ledger.changes),
        renames=names.renames(),
        dropped=names.dropped(),
        warnings=tuple(caution.text for caution in ledger.cautions),
        parallel_drafting=parallel,
        num_speculative_tokens=depth,
        copies=names.copies(),
        zeros=dict(names.zeros),
        rows={name: rows for name, rows in names.rows.items() if names.has(name)},
    )
