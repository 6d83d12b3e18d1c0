# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - Ctrl-C is answered before the imports, which take most of a second
"""Serve a draft with vLLM from a plain command line, without Hydra: the same stages as the recipe.

python -m nemo_automodel.components.speculative.serve_vllm --target T --draft D [--print-only] [-- more vLLM flags]
python -m nemo_automodel.components.speculative.serve_vllm doctor --draft D [--target T] [--vllm X]
python -m nemo_automodel.components.speculative.serve_vllm convert --draft D [--out DIR]    (.bin -> safetensors)
python -m nemo_automodel.components.speculative.serve_vllm runtimes [--remove NAME]         (managed environments)
python -m nemo_automodel.components.speculative.serve_vllm diagnose --draft D --target T --served DIR
python -m nemo_automodel.components.speculative.serve_vllm publish --draft D --target T --out DIR [--push REPO]
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = "interrupted"


def _stop_importing(*_: object) -> None:
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _stop_importing)

import argparse
from pathlib import Path
from typing import Sequence

from rich.console import Console

from nemo_automodel.components.speculative.serve.cli_words import OneLineParser, as_flags
from nemo_automodel.components.speculative.serve.doctor import diagnose
from nemo_automodel.components.speculative.serve.extra_words import parse_extra, served_name
from nemo_automodel.components.speculative.serve.managed import main as run_runtimes
from nemo_automodel.components.speculative.serve.options import refuse_unusable
from nemo_automodel.components.speculative.serve.pipeline import run_export, run_serve
from nemo_automodel.components.speculative.serve.publish import run_publish
from nemo_automodel.components.speculative.serve.report import Report
from nemo_automodel.components.speculative.serve.secret_names import refuse_secret_words
from nemo_automodel.components.speculative.serve.types import Engine, ServeSpec, SharedTensors
from nemo_automodel.errors import ConfigError, Interrupted, UserError
from nemo_automodel.files import expand_user

PROG = "python -m nemo_automodel.components.speculative.serve_vllm"


class _Parser(OneLineParser):
    for_unrecognized = "vLLM's own flags go after a --"


def _text(value: str) -> str:
    """A flag's text. An empty one is an unset shell variable, and would mean the current folder or all addresses."""
    if not value.strip():
        raise argparse.ArgumentTypeError("it is empty (an unset variable?)")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The flags of design section 1."""
    parser = _Parser(prog=PROG, description="Serve an EAGLE-3 or P-EAGLE draft with vLLM.", allow_abbrev=False)
    add = parser.add_argument
    add("--target", type=_text, required=True, help="target model: a folder or a Hub id")
    add("--draft", type=_text, required=True, help="draft: a run, a checkpoint, a model folder or a Hub id")
    add("--num-speculative-tokens", type=int, metavar="K", help="tokens per draft; default: the draft's trained depth")
    add("--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)")
    add("--host", type=_text, default="127.0.0.1", help="(default: %(default)s)")
    add("--tp-size", type=int, default=1, help="tensor parallel size (default: %(default)s)")
    add("--draft-tp-size", type=int, help="1 or the value of --tp-size; default: vLLM's choice")
    add("--dtype", type=_text, default="auto", help="(default: %(default)s)")
    add("--max-model-len", type=int, help="longest prompt and answer in tokens; default: the target's")
    add("--gpu-memory-utilization", type=float, default=0.8, help="(default: %(default)s)")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    add("--method", type=_text, help="only to insist on what the draft is: eagle3 or peagle")
    add("--engine", choices=[e.value for e in Engine], default="vllm", help="(default: %(default)s)")
    add("--python", type=_text, help="interpreter that has the engine (default: this one)")
    add("--export-dir", type=_text, help="where to write the export; default: vllm_export/ beside the draft's weights")
    shared = "draft tensors that are byte for byte the target's; omit: vLLM uses the target's (default: %(default)s)"
    add("--export-shared", choices=[s.value for s in SharedTensors], default="keep", help=shared)
    release = "release to prepare for, such as 0.32 (default: the installed one)"
    add("--vllm-version", type=_text, default="auto", help=release)
    add("--export-only", action="store_true", help="write the export and print its folder, start nothing")
    add("--print-only", action="store_true", help="print the command, write nothing, start nothing")
    parser.epilog = (
        "Everything after -- goes to vLLM: -- --max-num-seqs 8 --enforce-eager. "
        "Other commands, each with a --help of its own: doctor, convert, runtimes, diagnose, publish."
    )
    return parser


def build_doctor_parser() -> argparse.ArgumentParser:
    """The flags of `doctor`: what is examined, and the options that a verdict can depend on."""
    parser = _Parser(
        prog=f"{PROG} doctor",
        description="List everything that is wrong with a draft, or would be mended, without vLLM. "
        "Exit code: 0 it would serve, 1 it would not, 2 the chosen vLLM is too old for it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--draft", type=_text, required=True, help="draft: a run, a checkpoint, a model folder or a Hub id")
    add("--target", type=_text, help="target model: a folder or a Hub id; without one, less can be checked")
    add(
        "--vllm",
        type=_text,
        default="auto",
        metavar="X",
        help="release, such as 0.32 (default: the installed one, else the newest)",
    )
    add("--num-speculative-tokens", type=int, metavar="K", help="tokens per draft; default: the draft's trained depth")
    add("--tp-size", type=int, default=1, help="tensor parallel size (default: %(default)s)")
    add("--draft-tp-size", type=int, help="1 or the value of --tp-size; default: vLLM's choice")
    add("--max-model-len", type=int, help="longest prompt and answer in tokens; default: the target's")
    add("--method", type=_text, help="only to insist on what the draft is: eagle3 or peagle")
    parser.epilog = "Everything after -- is taken for vLLM's flags: -- --max-num-seqs 8"
    return parser


def run_doctor(words: Sequence[str], extra: Sequence[str]) -> int:
    """Print the diagnosis on stdout.

    Raises:
        ConfigError: no such vLLM release, or words after -- that are no flags.
    """
    args, more = build_doctor_parser().parse_args(words), parse_extra(extra)
    spec = ServeSpec(
        checkpoint=_draft(args.draft),
        target=args.target or "",
        print_only=True,
        tensor_parallel_size=args.tp_size,
        draft_tensor_parallel_size=args.draft_tp_size,
        num_speculative_tokens=args.num_speculative_tokens,
        method=args.method,
        max_model_len=args.max_model_len,
        vllm_version=args.vllm,
        served_model_name=served_name(more),
        extra_args=more,
    )
    refuse_unusable(spec)
    diagnosis = diagnose(spec, Path.cwd())
    Report(Console(highlight=False), as_flags).diagnosis(diagnosis)
    return diagnosis.exit_code


def run_convert(words: Sequence[str]) -> int:
    """`.bin` weights -> safetensors; the new folder is printed on stdout.

    Raises:
        ResolveError: nothing to convert, a file that is not safe to load, or the new folder is there already.
    """
    from nemo_automodel.components.speculative.serve.convert import convert_bin

    parser = _Parser(
        prog=f"{PROG} convert", description="Write a draft's .bin weights as safetensors into a folder of their own."
    )
    parser.add_argument("--draft", type=_text, required=True, help="folder with config.json and *.bin")
    parser.add_argument("--out", type=_text, help="new folder (default: <draft>-safetensors beside it)")
    args = parser.parse_args(words)
    draft = expand_user(args.draft).absolute()
    print(convert_bin(draft, expand_user(args.out).absolute() if args.out else None), flush=True)
    return 0


def _draft(given: str) -> str:
    """Raises ConfigError: the recipe's words for its newest run, which this command line knows nothing of."""
    if given in ("LATEST", "BEST") and not Path(given).exists() and not Path(given).is_symlink():
        found = f"{given} is a word of the recipe's: its newest run"
        raise ConfigError(found, where="--draft", remedy=f"give a path: --draft RUN/checkpoints/{given}")
    return given


def spec_from_args(args: argparse.Namespace, extra: Sequence[str]) -> ServeSpec:
    """The same plain value that the recipe makes from Hydra's config."""
    more = parse_extra(extra)
    return ServeSpec(
        checkpoint=_draft(args.draft),
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
        export_dir=args.export_dir and str(expand_user(args.export_dir).absolute()),
        export_shared=SharedTensors(args.export_shared),
        vllm_version=args.vllm_version,
        engine=Engine(args.engine),
        python=args.python,
        served_model_name=served_name(more),
        extra_args=more,
    )


COMMANDS = ("doctor", "convert", "runtimes", "diagnose", "publish")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 vLLM missing or too old, 130 interrupted."""
    try:
        if signal.getsignal(signal.SIGINT) is _stop_importing:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return _run(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        print(f"error: {as_flags(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a disk, a closed pipe: nothing that a traceback would explain
        print(f"error: {error} [{error.filename or 'this machine'}] -> see the reason, then run again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return Interrupted.exit_code


def _run(words: list[str]) -> int:
    """One command.

    Raises:
        UserError: any stage's own, a word that is no command, a secret among the words.
    """
    cut = words.index("--") if "--" in words else len(words)
    refuse_secret_words(words, where="command line")
    if words[:1] == ["doctor"]:
        return run_doctor(words[1:cut], words[cut + 1 :])
    if words[:1] == ["convert"]:
        return run_convert(words[1:])
    if words[:1] == ["runtimes"]:
        return run_runtimes(words[1:])
    if words[:1] == ["publish"]:
        return run_publish(words[1:], prog=f"{PROG} publish")
    if words[:1] == ["diagnose"]:
        from nemo_automodel.components.speculative.bench.diagnose_cli import run_diagnose

        return run_diagnose(words[1:], prog=f"{PROG} diagnose")
    if words and not words[0].startswith("-"):
        remedy = f"one of {', '.join(COMMANDS)}; or --target T --draft D to serve"
        raise ConfigError(f"there is no command {words[0]!r}", where="command line", remedy=remedy)
    args = build_parser().parse_args(words[:cut])
    spec = spec_from_args(args, words[cut + 1 :])
    report = Report(words=as_flags)
    if args.export_only:
        return run_export(spec, base_dir=Path.cwd(), report=report)
    return run_serve(spec, base_dir=Path.cwd(), out_dir=None, report=report)


if __name__ == "__main__":
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: the exit code stays what it is
    sys.exit(code)
