# SPDX-License-Identifier: Apache-2.0
"""The command line without Hydra, run as users run it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from drafts import write_draft, write_target

from nemo_automodel.components.speculative.serve.cli_words import FLAGS, as_flags
from nemo_automodel.components.speculative.serve_vllm import build_parser, main, parse_extra, spec_from_args
from nemo_automodel.config.schema import ServeConfig
from nemo_automodel.errors import ConfigError

REPO = Path(__file__).parents[2]
MODULE = "nemo_automodel.components.speculative.serve_vllm"


def run(cwd: Path, *words: str, code: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", MODULE]
    environ = {**os.environ, "PYTHONPATH": str(REPO), **env}
    return subprocess.run(
        [sys.executable, *start, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_draft(tmp_path / "run" / "checkpoints" / "epoch_0_step_5" / "model")
    write_target(tmp_path / "target")
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(f) for f in folder.rglob("*")}


def test_print_only_prints_one_line_and_writes_nothing(here: Path) -> None:
    before = files(here)
    done = run(
        here, "--target", "target", "--draft", "run", "--port", "9001", "--print-only", "--", "--max-num-seqs", "8"
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    words = shlex.split(line)
    assert words[words.index("--model") + 1] == str(here / "target")
    assert words[words.index("--port") + 1] == "9001" and line.endswith("--max-num-seqs 8")
    assert "architectures" in done.stderr
    assert files(here) == before


def test_printing_loads_no_heavy_package(here: Path) -> None:
    code = (
        "import sys\n"
        f"from {MODULE} import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'vllm', 'datasets', 'numpy', 'omegaconf', 'httpx', 'huggingface_hub'}\n"
        "print(code, sorted(heavy & set(sys.modules)))\n"
    )
    done = run(here, "--target", "target", "--draft", "run", "--print-only", code=code)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.parametrize("env", [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_hub_target_that_cannot_be_read_is_still_printed(here: Path, env: dict[str, str]) -> None:
    words = ("--target", "some-org/some-model", "--draft", "run", "--print-only")
    done = run(here, *words, HF_HOME=str(here / "hf"), **env)
    assert "Retrying" not in done.stderr
    assert done.returncode == 0 and "--model some-org/some-model" in done.stdout
    assert "skipped" in done.stderr


MISTAKES = {
    "--draft nowhere": ("[--draft]", "no such path"),
    "--target ./nowhere": ("[--target]", ""),
    "--num-speculative-tokens -1": ("[--num-speculative-tokens]", "or leave it out"),
    "--port 99999999": ("[--port]", "--port 8000, or 0"),
    "--host no.such.host.invalid": ("[--host]", "--host 127.0.0.1"),
    "--dtype float99": ("[--dtype]", "one of"),
    "--method medusa": ("[--method]", "leave it out"),
    "--tp-size 3": ("[--tp-size]", ""),
    "--max-model-len 99999": ("[--max-model-len]", "--max-model-len 256 or less"),
    "--python ./no/python": ("[--python]", "there is no executable"),
    "--vllm-version banana": ("[--vllm-version]", "give one like"),
    "--vllm-version 0.15": ("[--vllm-version]", "0.16"),
    "--engine sglang": ("[--engine sglang]", "--engine vllm"),
    "--export-dir run/checkpoints/epoch_0_step_5/model/config.json": ("[--export-dir]", "--export-dir FOLDER that can"),
    "-- --port 1": ("[-- --port]", "give --port before the --"),
    "-- --tensor-parallel-size 2": ("[-- --tensor-parallel-size]", "give --tp-size before the --"),
    "-- --disable-log-stats": ("[-- --disable-log-stats]", "leave it out"),
    "--num-speculative-tokens -2": ("[--num-speculative-tokens]", "give 0 (no speculation) or more"),
    "--gpu-memory-utilization nan": ("[--gpu-memory-utilization]", "give in (0, 1]"),
    "--gpu-memory-utilization 1.5": ("[--gpu-memory-utilization]", "give in (0, 1]"),
    "--host 127.0.0.1:80": ("[--host]", "--host 127.0.0.1 and --port 80"),
    "--target run": ("[--target]", "no config.json"),
    "--target target/config.json": ("[--target]", "is a file"),
    "--target run/checkpoints/epoch_0_step_5/model": ("[--target]", "is a draft"),
    "--draft LATEST": ("[--draft]", "a word of the recipe's"),
    "--export-dir /": ("[--export-dir]", "the root of the file system"),
    "--export-dir target": ("[--export-dir]", "the target's own folder"),
    "--export-dir run/checkpoints/epoch_0_step_5/model": ("[--export-dir]", "the draft's weights"),
    "-- --served-model-name": ("[after --]", "has no value"),
    "-- --served-model-name=": ("[-- --served-model-name]", "it is empty"),
    "-- --max-num-seqs": ("[-- --max-num-seqs]", "has no value"),
    "-- --max-num-seqs abc": ("[-- --max-num-seqs]", "give a whole number"),
    "-- --config f.yaml": ("[-- --config]", "give the flags of that file themselves"),
    "-- --headless": ("[-- --headless]", "starts no API server"),
    "-- --runner pooling": ("[-- --runner]", "writes no text"),
    "-- --load-format dummy": ("[-- --load-format]", "random weights"),
    "-- --data-parallel-rank 1": ("[-- --data-parallel-rank]", "wait for each other"),
    "-- -tp 2": ("[after --]", "give --tp-size before the --"),
    "-- -O3": ("[after --]", "write --optimization-level"),
    "-- ---x": ("[after --]", "write --flag VALUE"),
    "-- 8": ("[after --]", "belongs to no flag"),
    "--no-such-flag": ("[command line]", "after a --"),
    "--port abc": ("[command line]", "--help"),
    "--target=": ("[command line]", "--target: it is empty"),
    "--host=": ("[command line]", "--host: it is empty"),
}


@pytest.mark.parametrize("given", MISTAKES)
def test_mistakes_fail_in_one_line_in_the_words_of_this_command_line(
    here: Path, given: str, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(here)
    before, _, rest = given.partition("-- ") if given.startswith("-- ") else (given, "", "")
    words = ["--target", "target", "--draft", "run", *before.split()]
    words += [] if "--export-dir" in given else ["--print-only"]
    code = main(
        [*words, *(["--export-only"] if "--export-dir" in given else []), *(["--", *rest.split()] if rest else [])]
    )
    shown = capsys.readouterr()
    where, told = MISTAKES[given]
    assert code == (2 if given.endswith("0.15") else 1) and shown.out == ""
    (line,) = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert where in line and told in line, line
    assert not re.search(r"\bserve[./]|\bnull\b", shown.err), f"Hydra's words: {shown.err}"


def test_an_unset_variable_is_no_target_for_the_doctor(here: Path, capsys) -> None:
    """Without --target less is checked, and it says so; an empty one was meant to be something."""
    assert main(["doctor", "--draft", str(here / "run"), "--target", ""]) == 1
    assert "--target: it is empty" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["runtimes x", "diagnose", "publish", "publish --no-such-flag", "nonsense"])
def test_a_mistyped_command_is_no_missing_vllm(words: str, capsys) -> None:
    """argparse's own exit code is 2, which stands for a vLLM that is not there."""
    assert main(words.split()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and (words != "nonsense" or "one of doctor, convert" in line)


@pytest.mark.parametrize("command", ["doctor", "--export-only"])
def test_an_infinite_number_is_the_same_finding_for_the_doctor_and_the_export(here: Path, command: str, capsys) -> None:
    config = here / "run" / "checkpoints" / "epoch_0_step_5" / "model" / "config.json"
    config.write_text(config.read_text().replace("{", '{"odd": [1, Infinity],', 1))
    assert main([command, "--draft", str(here / "run"), "--target", str(here / "target")]) == 1
    shown = capsys.readouterr()
    assert "odd.1 in config.json" in shown.out + shown.err


def test_an_early_interrupt_is_one_line(here: Path) -> None:
    """The first import that is slow asks for the signal itself."""
    words = ["--target", "target", "--draft", "run", "--export-only"]
    (here / "rich").mkdir()
    (here / "rich" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = run(here, *words, PYTHONPATH=f"{here}:{REPO}")
    assert done.returncode == 130 and done.stderr == "interrupted\n"


def test_warnings_are_in_the_words_of_this_command_line_too(here: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(here)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    words = ["--target", "target", "--draft", "run", "--host", "0.0.0.0", "--num-speculative-tokens", "9"]
    assert main([*words, "--port", "0", "--print-only"]) == 0
    said = capsys.readouterr().err
    assert "--host 0.0.0.0 lets other machines ask without a key: export VLLM_API_KEY" in said
    assert "warning" in said and not re.search(r"\bserve[./]", said)


def test_every_key_of_the_schema_has_its_words() -> None:
    """A key that this command line has no flag for is named here, so that a new one is thought of."""
    hydra_only = {"enabled", "mode", "extra_args", "env", "vllm", "runtime", "benchmark"}
    assert {field.name for field in fields(ServeConfig)} == {key.partition(".")[0] for key in FLAGS} - {
        "vllm"
    } | hydra_only
    flags = {word for action in build_parser()._actions for word in action.option_strings}
    assert {flag for flag in FLAGS.values() if not flag.startswith("-- ")} <= flags


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("+serve.extra_args.max_num_seqs=8, or a smaller K", "-- --max-num-seqs 8, or a smaller K"),
        ("~serve.extra_args.seed, and more", "without --seed, and more"),
        ("serve/vllm=v0_22 or newer", "--vllm-version 0.22 or newer"),
        ("cannot read /runs/serve.port=1/x", "cannot read /runs/serve.port=1/x"),
        ("serve.print_only=true prints the line", "--print-only prints the line"),
        ("A_B is no name [serve.env]", "A_B is no name [environment]"),
    ],
)
def test_hydras_keys_become_flags_and_paths_stay(message: str, words: str) -> None:
    assert as_flags(message) == words


SECRET = "sk-very-secret-value"


@pytest.mark.parametrize(
    "given",
    [
        ["--", "--api-key", SECRET],
        ["--", f"--api-key={SECRET}"],
        ["--api-key", SECRET],
        [f"--api-key={SECRET}"],
        ["--", f"VLLM_API_KEY={SECRET}"],
        ["--", "--api-key", SECRET, SECRET],
        ["--", "--hf-overrides", f'{{"a": {{"password": "{SECRET}"}}}}'],
        ["--", "--allowed-origins", f"http://me:{SECRET}@host/"],
    ],
    ids=lambda words: words[-2][:20] if len(words) > 1 else words[0][:9],
)
def test_a_secret_is_refused_by_name_and_shown_nowhere(here: Path, given: list[str], capsys, monkeypatch) -> None:
    monkeypatch.chdir(here)
    before = files(here)
    assert main(["--target", "target", "--draft", "run", "--print-only", *given]) == 1
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err and files(here) == before
    key = "api" in str(given).lower()
    assert ("export VLLM_API_KEY in the shell" if key else "take it out") in shown.err
    assert key or f"[{given[1]}]" in shown.err, "the flag is named"


def test_a_served_name_after_the_dashes_is_taken() -> None:
    spec = spec_from_args(build_parser().parse_args(["--target", "t", "--draft", "d"]), ["--served-model-name", "m"])
    assert spec.served_model_name == "m" and spec.extra_args == {}


def test_the_flags_are_those_of_the_contract() -> None:
    flags = {word for action in build_parser()._actions for word in action.option_strings}
    wanted = (
        "target draft num-speculative-tokens port tp-size draft-tp-size dtype max-model-len gpu-memory-utilization "
        "trust-remote-code host method print-only"
    )
    assert {f"--{name}" for name in wanted.split()} <= flags


def test_serving_without_vllm_has_exit_code_2(here: Path) -> None:
    code = (
        "import sys, importlib.metadata as metadata\n"
        "def missing(name):\n"
        "    raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = missing\n"
        f"from {MODULE} import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = run(here, "--target", "target", "--draft", "run", "--port", "0", code=code)
    assert done.returncode == 2 and "pip install vllm" in done.stderr and "Traceback" not in done.stderr
    printed = run(here, "--target", "target", "--draft", "run", "--print-only", code=code)
    assert printed.returncode == 0 and "no vLLM in" in printed.stderr


def test_flags_become_the_spec() -> None:
    words = ["--target", "t", "--draft", "d", "--tp-size", "2", "--draft-tp-size", "1", "--dtype", "float32"]
    words += [
        "--max-model-len",
        "64",
        "--gpu-memory-utilization",
        "0.5",
        "--trust-remote-code",
        "--host",
        "h",
        "--method",
        "eagle3",
    ]
    spec = spec_from_args(
        build_parser().parse_args(words), ["--enforce-eager", "--seed=-3", "--hf-overrides", '{"a": 1}']
    )
    assert (spec.tensor_parallel_size, spec.draft_tensor_parallel_size, spec.dtype, spec.max_model_len) == (
        2,
        1,
        "float32",
        64,
    )
    assert (spec.gpu_memory_utilization, spec.trust_remote_code, spec.host, spec.method) == (0.5, True, "h", "eagle3")
    assert spec.extra_args == {"enforce-eager": True, "seed": "-3", "hf-overrides": '{"a": 1}'}


def test_several_values_are_several_words() -> None:
    assert parse_extra(["--lora-modules", "a=b", "c=d", "--seed", "1"]) == {"lora-modules": ["a=b", "c=d"], "seed": "1"}


def test_a_flag_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_extra(["--max-num-seqs", "1", "--max-num-seqs=2"])
