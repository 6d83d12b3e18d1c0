# SPDX-License-Identifier: Apache-2.0
"""The command line: what vLLM must be told, what it must not, and that the printed line is the started one."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemo_automodel.components.speculative.serve.command import (
    MANAGED,
    build_baseline_command,
    build_command,
    command_warnings,
)
from nemo_automodel.components.speculative.serve.types import Fixups, LaunchCommand, ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import release_for
from nemo_automodel.errors import ConfigError

PEAGLE = Fixups({}, (), {}, (), (), True, 4)
EAGLE3 = Fixups({}, (), {}, (), (), False, 3)


def build(
    fixups: Fixups = PEAGLE, *, vllm: str = "0.32", cpu: bool = False, environ: Any = None, **spec: Any
) -> LaunchCommand:
    from dataclasses import replace

    release = replace(release_for(vllm), cpu=cpu)
    options = ServeSpec(checkpoint="d", target="/models/a target", **spec)
    return build_command(
        Path("/x/o'k = ü/vllm_export"), fixups, options, release, "/venv/bin/python", 8001, environ or {}
    )


def value(command: LaunchCommand, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def test_vllm_is_told_method_depth_and_parallel_drafting() -> None:
    command = build()
    assert command.argv[:3] == ("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    assert json.loads(value(command, "--speculative-config")) == {
        "method": "eagle3",
        "model": "/x/o'k = ü/vllm_export",
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
    }
    assert value(command, "--port") == "8001" and value(command, "--host") == "127.0.0.1"
    assert json.loads(value(build(EAGLE3), "--speculative-config")).keys() == {
        "method",
        "model",
        "num_speculative_tokens",
    }
    drafted = json.loads(value(build(draft_tensor_parallel_size=1), "--speculative-config"))
    assert drafted["draft_tensor_parallel_size"] == 1


def test_every_option_reaches_its_flag() -> None:
    command = build(
        tensor_parallel_size=4,
        dtype="bfloat16",
        gpu_memory_utilization=0.5,
        max_model_len=512,
        trust_remote_code=True,
        served_model_name="m",
        host="0.0.0.0",
    )
    line = shlex.join(command.argv)
    assert "--host 0.0.0.0" in line and "--tensor-parallel-size 4 --dtype bfloat16 --gpu-memory-utilization 0.5" in line
    assert line.endswith("--max-model-len 512 --trust-remote-code --served-model-name m")
    assert "--trust-remote-code" not in build().argv and "--max-model-len" not in build().argv


def test_the_printed_line_runs_as_it_is(tmp_path: Path) -> None:
    python = tmp_path / "py thon"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nprintf "%s|%s\\n" "$FOO" "$RANK"\n')
    python.chmod(0o755)
    spec = ServeSpec(checkpoint="d", target="/t $HOME `x`", env={"FOO": "a b'c"}, extra_args={"override": {"k": "v w"}})
    command = build_command(Path("/e"), PEAGLE, spec, release_for("0.32"), str(python), 1, {"RANK": "0"})
    done = subprocess.run(
        ["sh", "-c", command.shell()], env={"RANK": "3", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [*command.argv[1:], "a b'c|"]
    assert shlex.split(command.shell())[-len(command.argv) :] == list(command.argv)


def test_launcher_variables_are_taken_out() -> None:
    inherited = dict.fromkeys(
        ("RANK", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "SLURM_PROCID", "HOME", "CUDA_VISIBLE_DEVICES"), "1"
    )
    unset = build(environ=inherited).unset
    assert {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "SLURM_PROCID"} <= set(unset)
    assert not {"HOME", "CUDA_VISIBLE_DEVICES"} & set(unset)
    assert {"RANK", "WORLD_SIZE", "MASTER_PORT"} <= set(build().unset)  # a pasted line may meet them in another shell
    assert "VLLM_USE_V2_MODEL_RUNNER" in build(environ={"VLLM_USE_V2_MODEL_RUNNER": "1"}).unset
    assert "RANK" not in build(env={"RANK": "0"}).unset


def test_cpu_memory_is_bounded_and_printed() -> None:
    assert (
        build(cpu=True).env == {"VLLM_CPU_KVCACHE_SPACE": "1"} and "VLLM_CPU_KVCACHE_SPACE=1" in build(cpu=True).shell()
    )
    assert build(cpu=True, environ={"VLLM_CPU_KVCACHE_SPACE": "4"}).env == {"VLLM_CPU_KVCACHE_SPACE": "4"}
    assert build(cpu=True, env={"VLLM_CPU_KVCACHE_SPACE": "2"}).env == {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert build(cpu=True, extra_args={"kv_cache_memory_bytes": "1G"}).env == {} and build().env == {}


def test_extra_flags() -> None:
    extra = {"max_num_seqs": 8, "enforce_eager": True, "enable_prefix_caching": False, "gone": None, "seed": -1}
    extra |= {"hf_overrides": {"a": [1]}, "allowed-origins": ["*"], "--uvicorn-log-level": "error"}
    words = build(extra_args=extra).argv
    tail = list(words[words.index("--max-num-seqs") :])
    assert tail == [
        *("--max-num-seqs", "8", "--enforce-eager", "--no-enable-prefix-caching", "--seed=-1"),
        *("--hf-overrides", '{"a": [1]}', "--allowed-origins", '["*"]', "--uvicorn-log-level", "error"),
    ]


@pytest.mark.parametrize("flag", [*MANAGED, "no-trust-remote-code", "tensor_parallel_size", "--port"])
def test_managed_flags_name_their_key(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"managed here .* set serve\.\w+ instead"):
        build(extra_args={flag: "1"})


@pytest.mark.parametrize("key", ["api_key", "api-key", "hf_token", "ssl-keyfile-password", "aws_access_key_id"])
def test_a_secret_never_reaches_the_command_line(key: str) -> None:
    with pytest.raises(ConfigError, match="secret") as caught:
        build(extra_args={key: "sk-very-secret"})
    assert "sk-very-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["VLLM_API_KEY", "HF_TOKEN", "db_password", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "PRIVATE_KEY_PEM"],
)
def test_a_secret_never_reaches_the_printed_environment(name: str) -> None:
    with pytest.raises(ConfigError, match="in the shell instead") as caught:
        build(env={name: "sk-very-secret"})
    assert "sk-very-secret" not in str(caught.value)


@pytest.mark.parametrize("extra", [{"a b": 1}, {"": 1}, {"x;rm": True}, {"Upper": 1}])
def test_what_is_no_flag_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no vLLM flag"):
        build(extra_args=extra)


def test_a_flag_that_ended_is_refused_for_releases_without_it() -> None:
    assert "--disable-log-requests" in build(vllm="0.16", extra_args={"disable_log_requests": True}).argv
    with pytest.raises(ConfigError, match="has no --disable-log-requests"):
        build(vllm="0.17", extra_args={"disable_log_requests": True})


def test_bad_environment_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="no environment variable"):
        build(env={"A=B": "1"})


def test_baselines_are_the_same_server_without_the_draft() -> None:
    spec = ServeSpec(checkpoint="d", target="/models/a target", extra_args={"max_num_seqs": 8})
    plain = build_baseline_command(spec, release_for("0.32"), "/venv/bin/python", 8001, environ={})
    ngram = build_baseline_command(spec, release_for("0.32"), "/venv/bin/python", 8001, ngram=True, environ={})
    speculating = list(build(extra_args={"max_num_seqs": 8}).argv)
    at = speculating.index("--speculative-config")
    assert list(plain.argv) == speculating[:at] + speculating[at + 2 :]
    lookup = json.loads(value(ngram, "--speculative-config"))
    assert (lookup["method"], lookup["num_speculative_tokens"]) == ("ngram", 4)


def test_an_open_host_without_a_key_is_warned_about() -> None:
    spec = ServeSpec(checkpoint="d", target="t", host="0.0.0.0")
    assert "VLLM_API_KEY" in command_warnings(spec, {})[0]
    assert command_warnings(spec, {"VLLM_API_KEY": "x"}) == ()
    for host in ("127.0.0.1", "127.0.1.1", "localhost", "::1"):
        assert command_warnings(ServeSpec(checkpoint="d", target="t", host=host), {}) == ()


def test_what_only_sounds_like_a_secret_passes() -> None:
    extra = {"max_num_batched_tokens": 8, "tokenizer_mode": "auto", "ssl_keyfile": "/k.pem"}
    assert "--max-num-batched-tokens" in build(extra_args=extra, env={"TOKENIZERS_PARALLELISM": "false"}).argv


def test_a_secret_inside_a_nested_flag_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="kv_transfer_config.extra.s3_secret_key") as caught:
        build(extra_args={"kv_transfer_config": {"extra": {"s3_secret_key": "sk-very-secret"}}})
    assert "sk-very-secret" not in str(caught.value)


@pytest.mark.parametrize("flag", ["disable_log_stats", "disable-log-stats"])
def test_a_server_without_counters_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="counters .*serve.extra_args"):
        build(extra_args={flag: True})
    assert "--no-disable-log-stats" in build(extra_args={flag: False}).argv
