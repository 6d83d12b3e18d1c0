# SPDX-License-Identifier: Apache-2.0
"""SGLang: what is printed and exported for it. No SGLang runs here; a script stands for its interpreter."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from drafts import draft_config, draft_tensors, write_draft, write_target
from launching import FAKE

from nemo_automodel.components.speculative.serve.pipeline import run_export, run_serve
from nemo_automodel.components.speculative.serve.sglang import plan_sglang
from nemo_automodel.components.speculative.serve.types import Engine, Fixups, RuntimeKind, RuntimeSpec, ServeSpec
from nemo_automodel.errors import ConfigError, FixupError, VllmMissingError
from nemo_automodel.files import read_safetensors_header

ROOT = Path(__file__).parents[2]
EAGLE3 = draft_config(parallel_drafting=..., num_depths=..., mask_token_id=..., ttt_steps=3, draft_vocab_size=32)


@pytest.fixture
def spec(tmp_path: Path) -> ServeSpec:
    return ServeSpec(
        checkpoint=str(write_draft(tmp_path / "draft", EAGLE3, draft_tensors(mask=False, draft_vocab=32))),
        target=str(write_target(tmp_path / "target")),
        engine=Engine.sglang,
        export_dir=str(tmp_path / "export"),
        print_only=True,
    )


def printed(spec: ServeSpec, tmp_path: Path, capsys) -> tuple[list[str], str]:
    assert run_serve(spec, base_dir=tmp_path, out_dir=None) == 0
    shown = capsys.readouterr()
    return shlex.split(shown.out.strip().split(" && ")[-1]), shown.err


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_launch_of_an_eagle3_draft(spec, tmp_path, capsys) -> None:
    spec = replace(spec, max_model_len=128, tensor_parallel_size=2, port=0, extra_args={"max_running_requests": 8})
    words, said = printed(spec, tmp_path, capsys)
    assert words[words.index("-m") + 1] == "sglang.launch_server" and after(words, "--model-path") == spec.target
    assert after(words, "--speculative-algorithm") == "EAGLE3"
    k = {"num-steps": "3", "eagle-topk": "1", "num-draft-tokens": "4"}
    assert {key: after(words, f"--speculative-{key}") for key in k} == k
    rest = {"--host": "127.0.0.1", "--tp-size": "2", "--context-length": "128", "--max-running-requests": "8"}
    assert {flag: after(words, flag) for flag in rest} == rest
    assert after(words, "--served-model-name") == spec.target and "--speculative-token-map" not in words
    assert "no SGLang in" in said and "target's embeddings" in said


def test_the_export_has_sglangs_names_and_layer_counting(spec, tmp_path, capsys) -> None:
    words, said = printed(spec, tmp_path, capsys)
    folder = Path(after(words, "--speculative-draft-model-path"))
    assert "--engine sglang --export-only" not in said
    run_export(spec, base_dir=tmp_path)
    assert folder == Path(capsys.readouterr().out.strip())
    names = {tensor.name for tensor in read_safetensors_header(folder / "model.safetensors").tensors}
    assert "midlayer.self_attn.q_proj.weight" in names and "d2t" in names
    assert not any(name.startswith(("layers.", "model.")) for name in names)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # SGLang adds one: 2, 4, 5
    run_export(replace(spec, engine=Engine.vllm), base_dir=tmp_path)
    assert folder != Path(capsys.readouterr().out.strip()), "vLLM's export is another"


def test_a_token_map_beside_the_draft_is_passed_on(spec, tmp_path, capsys) -> None:
    file = tmp_path / "draft" / "speculative_token_map.pt"
    file.write_bytes(b"PK")
    words, _ = printed(spec, tmp_path, capsys)
    assert after(words, "--speculative-token-map") == str(file)


def test_a_peagle_draft_is_sent_to_vllm(spec, tmp_path) -> None:
    peagle = replace(spec, checkpoint=str(write_draft(tmp_path / "peagle")))
    with pytest.raises(FixupError, match="SGLang cannot serve a P-EAGLE draft") as caught:
        run_serve(peagle, base_dir=tmp_path, out_dir=None)
    assert "serve.engine=vllm" in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"benchmark_mode": True, "print_only": False}, "serve.mode"),
        ({"runtime": RuntimeSpec(RuntimeKind.docker)}, "serve.engine"),
        ({"runtime": RuntimeSpec(RuntimeKind.managed)}, "serve.engine"),
        ({"draft_tensor_parallel_size": 1}, "serve.draft_tensor_parallel_size"),
        ({"extra_args": {"mem_fraction_static": 0.5}}, "serve.extra_args.mem_fraction_static"),
        ({"extra_args": {"max_num_seqs": 8}}, "serve.extra_args.max_num_seqs"),
        ({"extra_args": {"api-key": "x"}}, "serve.extra_args.api-key"),
        ({"extra_args": {"disable_radix_cache": False}}, "serve.extra_args.disable_radix_cache"),
    ],
)
def test_what_sglang_does_not_do_is_refused(spec, tmp_path, changes, where) -> None:
    with pytest.raises(ConfigError) as caught:
        run_serve(replace(spec, **changes), base_dir=tmp_path, out_dir=None)
    assert caught.value.where.startswith(where)


def test_parts_that_sglang_lacks() -> None:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 2, "fc_norm": True}
    plan = Fixups(config | {"norm_before_residual": True}, (), {}, (), (), False, 3)
    told = " ".join(plan_sglang(plan).warnings)
    assert "2 layers needs" in told and "fc_norm needs" in told and "norm_before_residual" in told
    for bad in ({"attention_bias": True}, {"architectures": ["Eagle3Qwen3ForCausalLM"]}):
        with pytest.raises(FixupError, match="SGLang's EAGLE-3 cannot serve"):
            plan_sglang(replace(plan, config=config | bad))


def test_without_sglang_the_exit_code_is_2(spec, tmp_path) -> None:
    with pytest.raises(VllmMissingError, match="SGLang is not installed") as caught:
        run_serve(replace(spec, print_only=False, port=0), base_dir=tmp_path, out_dir=None)
    assert caught.value.exit_code == 2


def test_a_server_is_ready_without_counters(spec, tmp_path) -> None:
    """Its /health, /v1/models and a completion; no spec-decode counters are asked for."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && { echo sglang 0.5.9; exit 0; }\nname=; port=\n'
        'while [ $# -gt 0 ]; do case "$1" in --served-model-name) name="$2";; --port) port="$2";; esac; shift; done\n'
        f'exec {sys.executable} {FAKE} "$port" "$name" no_counters\n'
    )
    python.chmod(0o755)
    spec = replace(spec, print_only=False, port=0, python=str(python))
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from nemo_automodel.components.speculative.serve.pipeline import run_serve\n"
        "from nemo_automodel.components.speculative.serve.types import Engine, ServeSpec\n"
        "from nemo_automodel.errors import UserError\n"
        f"spec = ServeSpec({spec.checkpoint!r}, {spec.target!r}, engine=Engine.sglang, port=0,\n"
        f"                 python={spec.python!r}, export_dir={spec.export_dir!r})\n"
        "try:\n    sys.exit(run_serve(spec, base_dir=Path('.'), out_dir=Path(sys.argv[1])))\n"
        "except UserError as error:\n    print(error, file=sys.stderr); sys.exit(error.exit_code)\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "out")]
    process = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)
    result, deadline = tmp_path / "out/result.json", time.monotonic() + 60
    while not (result.is_file() and json.loads(result.read_text())["server"]):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert json.loads(result.read_text())["status"] == "ok"
