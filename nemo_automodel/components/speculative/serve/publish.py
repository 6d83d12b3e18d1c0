# SPDX-License-Identifier: Apache-2.0
"""A folder ready for the Hub: the exported draft, and a model card that says what it is and what was measured.

python -m nemo_automodel.components.speculative.serve_vllm publish --draft D --target T --out DIR [--result result.json]

With `--speculators` config.json has the speculators format, which vLLM reads by itself: `vllm serve DIR` then finds the
target and the method in it (vLLM 0.32, `transformers_utils/config.py:maybe_override_with_speculators`). Nothing is
uploaded unless `--push` says where.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Mapping, Sequence

from nemo_automodel.components.speculative.serve.cli_words import OneLineParser
from nemo_automodel.components.speculative.serve.export import write_weights
from nemo_automodel.components.speculative.serve.export_plan import CONFIG, WEIGHTS
from nemo_automodel.components.speculative.serve.pipeline import plan_only
from nemo_automodel.components.speculative.serve.publish_card import Card, render_card
from nemo_automodel.components.speculative.serve.report import Report
from nemo_automodel.components.speculative.serve.types import Fixups, ServeSpec
from nemo_automodel.errors import ConfigError, ExportError
from nemo_automodel.files import expand_user, is_path_like, plain_mode, read_json, write_atomic, write_json

CARD = "README.md"
# What the speculators format keeps beside `transformer_layer_config`, with the value that absence stands for.
_OUTSIDE = {"draft_vocab_size": None, "target_hidden_size": None, "norm_before_residual": False,
            "norm_before_fc": False, "fc_norm": False, "norm_output": False,
            "eagle_aux_hidden_state_layer_ids": None}  # fmt: skip
_OURS = ("architectures", "parallel_drafting", "num_depths", "ttt_steps", "pard_token", "ptd_token_id", "mask_token_id",
         "down_sample_ratio", "down_sample_ratio_min", "_name_or_path", "transformers_version")  # fmt: skip


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of `publish`."""
    parser = OneLineParser(
        prog=prog,
        description="Write the exported draft and a model card into a new folder; upload it only with --push.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--draft", required=True, help="draft: a run, a checkpoint, a model folder or a Hub id")
    add("--target", required=True, help="target model: a folder or a Hub id")
    add("--out", required=True, help="new folder")
    add("--result", help="result.json of a benchmark of this draft, for the card's numbers")
    add("--speculators", action="store_true", help="config.json in the speculators format: `vllm serve DIR` is enough")
    add("--target-name", metavar="ID", help="the target's Hub id, for card and config, when --target is a folder")
    add("--num-speculative-tokens", type=int, metavar="K", help="default: K of --result, else the trained depth")
    add("--vllm-version", default="auto", help="release to prepare for, such as 0.32 (default: the installed one)")
    add(
        "--push", metavar="REPO", help="upload the folder to this repository of yours; login comes from the environment"
    )
    add("--private", action="store_true", help="with --push: make the repository private when it is made")
    return parser


def run_publish(words: Sequence[str], *, prog: str) -> int:
    """Write the folder, print it on stdout, upload it when told to.

    Raises:
        UserError: the draft cannot be exported, the folder is there already, or the result is another draft's.
    """
    args = build_parser(prog).parse_args(words)
    name = args.target_name or args.target
    if args.push and is_path_like(name, Path.cwd()):
        raise ConfigError(
            f"others do not have {name}", where="--target", remedy="add --target-name ORG/MODEL, the target's Hub id"
        )
    result = _read_result(args.result)
    k = args.num_speculative_tokens or ((result or {}).get("benchmark") or {}).get("k") or None
    out = expand_user(args.out).absolute()
    spec = ServeSpec(
        args.draft, args.target, num_speculative_tokens=k, vllm_version=args.vllm_version, export_dir=str(out)
    )
    plan = plan_only(spec, base_dir=Path.cwd())
    _refuse_another_draft(result, plan.resolved.model_dir)
    fixups = plan.fixups
    config = speculators_config(fixups, name) if args.speculators else dict(plan.export.config)
    card = Card(
        name=args.push or Path(args.out).name,
        target=name,
        parallel=fixups.parallel_drafting,
        k=fixups.num_speculative_tokens,
        speculators=args.speculators,
        trained=_read_training(plan.resolved.model_dir),
        checkpoint=plan.resolved.model_dir,
        result=result,
    )
    _write(out, plan.export, config, render_card(card))
    print(out, flush=True)
    if args.push:
        url = push(out, args.push, private=args.private)
        Report().say(f"uploaded: {url}")
    return 0


def speculators_config(fixups: Fixups, target: str) -> dict[str, Any]:
    """config.json of the speculators format, from that of the export. Pure."""
    config = dict(fixups.config)
    inner = {key: value for key, value in config.items() if key not in _OUTSIDE and key not in _OURS}
    outside = {key: config.get(key, absent) for key, absent in _OUTSIDE.items()}
    outer: dict[str, Any] = {
        "architectures": ["PEagleDraftModel" if fixups.parallel_drafting else "Eagle3DraftModel"],
        "speculators_model_type": "peagle" if fixups.parallel_drafting else "eagle3",
        "speculators_config": {
            "algorithm": "peagle" if fixups.parallel_drafting else "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": fixups.num_speculative_tokens}],
            "verifier": {"name_or_path": target},
        },
        "transformer_layer_config": inner,
        "tie_word_embeddings": False,
        **{key: value for key, value in outside.items() if value is not None},
    }
    if fixups.parallel_drafting:
        outer["mask_token_id"] = config["mask_token_id"]
    return outer


def _write(out: Path, plan: Any, config: Mapping[str, Any], card: str) -> None:
    """All files in a sibling temp folder, then one rename."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError("is there already", where=str(out), remedy="give --out a new folder, or remove this one")
    out.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        temp.chmod(plain_mode() | 0o111)
        write_weights(plan, temp / WEIGHTS)
        (temp / WEIGHTS).chmod(plain_mode())
        write_json(temp / CONFIG, dict(config))
        write_atomic(temp / CARD, card)
        os.replace(temp, out)  # onto an empty folder, or nothing
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _read_result(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    place = expand_user(path) / "result.json" if expand_user(path).is_dir() else expand_user(path)
    try:
        value = read_json(place)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot be read ({error})", where=str(place), remedy="give --result a result.json"
        ) from error
    if not value.get("benchmark"):
        raise ConfigError("holds no measurement", where=str(place), remedy="run serve.mode=benchmark first")
    return value


def _refuse_another_draft(result: Mapping[str, Any] | None, model_dir: Path) -> None:
    """A card with another checkpoint's numbers would be a lie."""
    if result and Path(result["checkpoint"]).resolve() != model_dir.resolve():
        raise ConfigError(
            f"measured {result['checkpoint']}, not {model_dir}",
            where="--result",
            remedy="give the result.json of this draft, or publish that one",
        )


def _read_training(model_dir: Path) -> dict[str, Any] | None:
    """What the run's train_job.json says, for a checkpoint of ours."""
    for folder in model_dir.parents:
        if (folder / "train_job.json").is_file():
            return read_json(folder / "train_job.json")
    return None


def push(folder: Path, repo: str, *, private: bool) -> str:
    """Upload the folder; the address it has then.

    Raises:
        ConfigError: the Hub refused.
    """
    import huggingface_hub

    try:
        huggingface_hub.create_repo(repo, private=private, exist_ok=True)
        return str(huggingface_hub.upload_folder(repo_id=repo, folder_path=str(folder)))
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"the folder is written, but not uploaded: {first}",
            where=f"--push {repo}",
            remedy="hf auth login, then again",
        ) from error
