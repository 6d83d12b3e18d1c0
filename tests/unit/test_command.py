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
from nemo_automodel.components.speculative.serve.vllm_flags import flags_for
from nemo_automodel.components.speculative.serve.vllm_release import known_minors, release_for
from nemo_automodel.errors import ConfigError

FACTS = Path(__file__).parents[2].parent / "shared" / "vllm" / "facts.json"
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
    spec = ServeSpec(
        checkpoint="d", target="/t $HOME `x`", env={"FOO": "a b'c"}, extra_args={"hf_overrides": {"k": "v w"}}
    )
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
    name = "VLLM_CPU_KVCACHE_SPACE"
    assert build(cpu=True).env[name] == "1" and f"{name}=1" in build(cpu=True).shell()
    assert build(cpu=True, environ={name: "4"}).env[name] == "4"
    assert build(cpu=True, env={name: "2"}).env[name] == "2"
    assert name not in build(cpu=True, extra_args={"kv_cache_memory_bytes": "1G"}).env and name not in build().env


CACHE = "VLLM_CACHE_ROOT"


def test_jobs_that_compile_other_code_have_other_caches() -> None:
    """vLLM's key of compiled code does not know K; the address and the checkpoint's place are no part of it."""
    mine = build(environ={"XDG_CACHE_HOME": "/big"}).env[CACHE]
    assert mine.startswith("/big/vllm/jobs/") and mine in build(environ={"XDG_CACHE_HOME": "/big"}).shell()
    deeper = Fixups({}, (), {}, (), (), True, 5)
    other_draft = Fixups({"num_hidden_layers": 2}, (), {}, (), (), True, 4)
    changed = {
        build(environ={"XDG_CACHE_HOME": "/big"}, **how).env[CACHE]
        for how in (
            {"fixups": deeper}, {"fixups": EAGLE3}, {"fixups": other_draft}, {"dtype": "float32"},
            {"tensor_parallel_size": 2}, {"max_model_len": 64}, {"extra_args": {"max_num_seqs": 4}},
        )
    }  # fmt: skip
    assert len(changed | {mine}) == 8
    spec = ServeSpec(checkpoint="d", target="/models/a target")
    bare = build_baseline_command(spec, release_for("0.32"), "/venv/bin/python", 8001, environ={})
    assert bare.env[CACHE].rpartition("/")[2] != mine.rpartition("/")[2]


def test_one_job_keeps_its_cache() -> None:
    mine = build().env[CACHE]
    assert build(host="0.0.0.0", served_model_name="m").env[CACHE] == mine
    spec = ServeSpec(checkpoint="another", target="/models/a target")
    elsewhere = build_command(Path("/y/epoch_2"), PEAGLE, spec, release_for("0.32"), "/venv/bin/python", 99, {})
    assert elsewhere.env[CACHE] == mine


def test_a_cache_that_is_asked_for_wins() -> None:
    assert build(env={CACHE: "/mine"}).env[CACHE] == "/mine"
    assert build(environ={CACHE: "/disk"}).env[CACHE].startswith("/disk/jobs/")


def test_extra_flags() -> None:
    extra = {"max_num_seqs": 8, "enforce_eager": True, "enable_prefix_caching": False, "revision": None, "seed": -1}
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
    with pytest.raises(ConfigError, match=r"0.17 has no --disable-log-requests \(it ended before 0.17\)"):
        build(vllm="0.17", extra_args={"disable_log_requests": True})


@pytest.mark.parametrize(
    ("vllm", "flag", "told"),
    [
        ("0.32", "max_num_sqes", "did you mean serve.extra_args.max_num_seqs?"),
        ("0.32", "enforce-eagre", "did you mean serve.extra_args.enforce_eager?"),
        ("0.26", "per_request_spec_decode_metrics", "came with 0.29"),
        ("0.18", "swap_space", "ended before 0.18"),
        ("0.33", "zzz", "leave it out"),
    ],
)
def test_a_flag_that_the_release_does_not_have_is_refused(vllm: str, flag: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM {vllm} has no --") as caught:
        build(vllm=vllm, extra_args={flag: 1})
    assert told in str(caught.value) and caught.value.where == f"serve.extra_args.{flag}"


@pytest.mark.parametrize(
    "flag", ["max_num_seqs", "max-num-batched", "hf_overrides.rope_theta", "no_enable_prefix_caching", "chat_template"]
)
def test_every_spelling_that_vllm_takes_passes(flag: str) -> None:
    for minor in known_minors():
        assert f"--{flag.replace('_', '-')}".partition(".")[0] in " ".join(build(vllm=minor, extra_args={flag: 1}).argv)


def test_an_unknown_newer_release_is_only_warned_about() -> None:
    command = build(vllm="0.99", extra_args={"brand_new_flag": 1, "max_num_seqs": 8})
    assert "--brand-new-flag" in command.argv
    spec = ServeSpec(checkpoint="d", target="t", extra_args={"brand_new_flag": 1, "max_num_seqs": 8})
    (warning,) = command_warnings(spec, release_for("0.99"), {})
    assert "--brand-new-flag" in warning and "as far as is known" in warning
    assert command_warnings(spec, release_for("0.33"), {}) == ()


@pytest.mark.skipif(not FACTS.is_file(), reason="no ../shared/vllm/facts.json beside the repository")
def test_the_flags_agree_with_the_facts_that_were_read_elsewhere() -> None:
    for version, facts in json.loads(FACTS.read_text())["versions"].items():
        known = flags_for(version)
        for flag, there in facts["server"]["flags"].items():
            assert not flag.startswith("--") or (flag[2:] in known) == there, (version, flag)


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
    release = release_for("0.32")
    assert "VLLM_API_KEY" in command_warnings(spec, release, {})[0]
    assert command_warnings(spec, release, {"VLLM_API_KEY": "x"}) == ()
    for host in ("127.0.0.1", "127.0.1.1", "localhost", "::1"):
        assert command_warnings(ServeSpec(checkpoint="d", target="t", host=host), release, {}) == ()


def test_what_only_sounds_like_a_secret_passes() -> None:
    extra = {"max_num_batched_tokens": 8, "tokenizer_mode": "auto", "ssl_keyfile": "/k.pem"}
    assert "--max-num-batched-tokens" in build(extra_args=extra, env={"TOKENIZERS_PARALLELISM": "false"}).argv


def test_a_secret_inside_a_nested_flag_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="kv_transfer_config.extra.s3_secret_key") as caught:
        build(extra_args={"kv_transfer_config": {"extra": {"s3_secret_key": "sk-very-secret"}}})
    assert "sk-very-secret" not in str(caught.value)


def test_a_list_is_several_words_where_vllm_takes_several() -> None:
    argv = build(extra_args={"lora_modules": ["a=b", "c=d"], "allowed_origins": ["x"]}).argv
    at = argv.index("--lora-modules")
    assert argv[at + 1 : at + 3] == ("a=b", "c=d") and '["x"]' in argv


@pytest.mark.parametrize("flag", ["disable_log_stats", "disable-log-stats"])
def test_a_server_without_counters_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="counters .*serve.extra_args"):
        build(extra_args={flag: True})
    assert "--no-disable-log-stats" in build(extra_args={flag: False}).argv
