# SPDX-License-Identifier: Apache-2.0
"""Serve a draft with vLLM from a plain command line, without Hydra: the same stages as the recipe.

python -m nemo_automodel.components.speculative.serve_vllm --target T --draft D [--print-only] [-- more vLLM flags]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Sequence

from nemo_automodel.components.speculative.serve.pipeline import run_export, run_serve
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.errors import ConfigError, Interrupted, UserError

PROG = "python -m nemo_automodel.components.speculative.serve_vllm"


def build_parser() -> argparse.ArgumentParser:
    """The flags of design section 1."""
    parser = argparse.ArgumentParser(
        prog=PROG, description="Serve an EAGLE-3 or P-EAGLE draft with vLLM.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--target", required=True, help="target model: a folder or a Hub id")
    add("--draft", required=True, help="draft: a run, a checkpoint, a model folder or a Hub id")
    add("--num-speculative-tokens", type=int, metavar="K", help="tokens per draft; default: the draft's trained depth")
    add("--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)")
    add("--host", default="127.0.0.1", help="(default: %(default)s)")
    add("--tp-size", type=int, default=1, help="tensor parallel size (default: %(default)s)")
    add("--draft-tp-size", type=int, help="1 or the value of --tp-size; default: vLLM's choice")
    add("--dtype", default="auto", help="(default: %(default)s)")
    add("--max-model-len", type=int, help="longest prompt and answer in tokens; default: the target's")
    add("--gpu-memory-utilization", type=float, default=0.8, help="(default: %(default)s)")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    add("--method", help="only to insist on what the draft is: eagle3 or peagle")
    add("--export-dir", help="where to write the export; default: vllm_export/ beside the draft's weights")
    add("--vllm-version", default="auto", help="release to prepare for, such as 0.32 (default: the installed one)")
    add("--export-only", action="store_true", help="write the export and print its folder, start nothing")
    add("--print-only", action="store_true", help="print the command, write nothing, start nothing")
    parser.epilog = "Everything after -- goes to vLLM: -- --max-num-seqs 8 --enforce-eager"
    return parser


def parse_extra(words: Sequence[str]) -> dict[str, Any]:
    """vLLM flags as `serve.extra_args`: --flag VALUE, --flag=VALUE, or a bare --flag (true).

    Raises:
        ConfigError: a word that belongs to no flag, or a flag given twice.
    """
    extra: dict[str, Any] = {}
    i = 0
    while i < len(words):
        word = words[i]
        if not word.startswith("--") or word == "--":
            raise ConfigError(
                f"{word!r} belongs to no flag", where="after --", remedy="write --flag VALUE or --flag=VALUE"
            )
        key, equals, value = word[2:].partition("=")
        i += 1
        if key in extra:
            raise ConfigError(f"--{key} is given twice", where="after --", remedy="keep one")
        if not equals and i < len(words) and not words[i].startswith("--"):
            value, equals = words[i], "="
            i += 1
        extra[key] = value if equals else True
    return extra


def spec_from_args(args: argparse.Namespace, extra: Sequence[str]) -> ServeSpec:
    """The same plain value that the recipe makes from Hydra's config."""
    return ServeSpec(
        checkpoint=args.draft,
        target=args.target,
        print_only=args.print_only,
        host=args.host,
        port=args.port,
        tensor_parallel_size=args.tp_size,
        draft_tensor_parallel_size=args.draft_tp_size,
        num_speculative_tokens=args.num_speculative_tokens,
        method=args.method,
        dtype=args.dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=args.max_model_len,
        trust_remote_code=args.trust_remote_code,
        export_dir=args.export_dir and str(Path(args.export_dir).expanduser().absolute()),
        vllm_version=args.vllm_version,
        extra_args=parse_extra(extra),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 vLLM missing or too old (argparse's own usage errors too), 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args = build_parser().parse_args(words[:cut])
    try:
        spec = spec_from_args(args, words[cut + 1 :])
        if args.export_only:
            return run_export(spec, base_dir=Path.cwd())
        return run_serve(spec, base_dir=Path.cwd(), out_dir=None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return Interrupted.exit_code


if __name__ == "__main__":
    sys.exit(main())
