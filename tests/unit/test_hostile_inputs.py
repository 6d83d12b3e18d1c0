# SPDX-License-Identifier: Apache-2.0
"""Files, names and answers that nobody should send: each ends in one line, none hangs, leaks or is believed."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafts import draft_config, write_draft, write_target

from nemo_automodel import files
from nemo_automodel.components.speculative.serve.command import build_baseline_command, extra_flags
from nemo_automodel.components.speculative.serve.port import find_port
from nemo_automodel.components.speculative.serve.record import RESULT, JobRecord, record_failure
from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.secret_names import is_secret_name
from nemo_automodel.components.speculative.serve.target_facts import read_target
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.components.speculative.serve.vllm_release import release_for
from nemo_automodel.components.speculative.serve_vllm import main
from nemo_automodel.errors import ConfigError, ResolveError
from nemo_automodel.files import fsync_dir

RELEASE = release_for("0.32")


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A file that blocks ends the test instead of the suite."""

    def late(*_: object) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe_instead(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def device_instead(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("replace", [pipe_instead, device_instead])
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str, replace: Any) -> None:
    draft = write_draft(tmp_path / "draft", shards=2 if "index" in name else 1)
    replace(draft / name)

    with pytest.raises(ResolveError, match="is no ordinary file"):
        resolve(str(draft), tmp_path)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        {"x": ENTRY | {"data_offsets": ["0", "4"]}},
        {"x": ENTRY, "y": ENTRY | {"data_offsets": ["4", 8]}},
        {"x": ENTRY | {"data_offsets": [0.0, 4.0]}},
        {"x": ENTRY | {"dtype": ["F32"]}},
        {"x": ENTRY | {"shape": [None]}},
        {"x": ENTRY | {"shape": [-1, -1]}},
        {"x": ENTRY | {"shape": [True]}},
    ],
    ids=str,
)
def test_a_header_of_the_wrong_types_is_named(tmp_path: Path, header: dict[str, Any]) -> None:
    draft, text = write_draft(tmp_path / "draft"), json.dumps(header).encode()
    (draft / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"abcd")

    with pytest.raises(ResolveError, match="malformed tensor entry"):
        resolve(str(draft), tmp_path)


def test_json_without_end_of_nesting_is_named(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft")
    (draft / "config.json").write_text("[" * 100_000 + "]" * 100_000)

    with pytest.raises(ResolveError, match="config.json: not JSON"):
        resolve(str(draft), tmp_path)


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000, "~nobody-here/x"])
def test_impossible_paths_are_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_target(tmp_path / "target")

    assert main(["--draft", str(tmp_path / name), "--target", str(target), "--print-only"]) == 1
    assert main(["--draft", name, "--target", str(target), "--print-only"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") and "--draft" in line for line in lines)


def test_a_target_below_nobody_s_home_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResolveError, match="no folder"):
        read_target("~nobody-here/x", tmp_path)


def test_two_spellings_of_one_shard_lose_no_tensor(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", shards=2)
    whole, index = resolve(str(draft), tmp_path), draft / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = min(content["weight_map"])
    content["weight_map"][first] = f"./{content['weight_map'][first]}"
    index.write_text(json.dumps(content))

    assert resolve(str(draft), tmp_path).names() == whole.names()


def test_an_error_cannot_move_the_cursor_or_break_the_terminal_s_encoding() -> None:
    text = str(ConfigError("a\x1b[2Jb\rc\udcff", where="x\ny", remedy="zürich 数"))

    assert text == r"a\x1b[2Jb\rc\udcff [x y] -> zürich 数"


def test_what_a_draft_s_config_spells_cannot_break_the_terminal_or_the_export(tmp_path: Path) -> None:
    """JSON can spell half a surrogate and an escape; vLLM ignores both in a key that it does not know."""
    draft, target = write_draft(tmp_path / "d", config=draft_config(zz="\ud800", qq=["\ud800"])), tmp_path / "t"
    write_target(target)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "auto_map": {"A": "\ud800\x1b[2J"}}))
    words = [sys.executable, "-m", "nemo_automodel.components.speculative.serve_vllm"]
    named = ["--draft", str(draft), "--target", str(target)]
    for command in (["doctor", *named], [*named, "--export-only", "--export-dir", str(tmp_path / "x")]):
        done = subprocess.run([*words, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert "\x1b[2J" not in done.stdout + done.stderr


def test_folders_that_cannot_be_flushed_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(files.os, "fsync", refuse)
    fsync_dir(tmp_path)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("tensor_parallel", "serve.tensor_parallel_size"),
        ("speculative-conf", "serve.checkpoint"),
        ("speculative_config.num_speculative_tokens", "serve.num_speculative_tokens"),
        ("max-model", "serve.max_model_len"),
        ("no-trust-remote", "serve.trust_remote_code"),
        ("api-k", "VLLM_API_KEY"),
        ("hf-tok", "HF_TOKEN"),
        ("disable-log-stat", "counters"),
    ],
)
def test_an_abbreviation_that_vllm_completes_is_refused_like_the_whole_flag(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        extra_flags({key: "hunter2"}, RELEASE)
    managed = "serve.checkpoint" if key.startswith("speculative") else meant
    assert managed in str(caught.value) and "hunter2" not in str(caught.value)


def test_keys_of_a_json_value_keep_their_underscores() -> None:
    assert extra_flags({"hf_overrides.rope_theta": 5}, RELEASE) == ["--hf-overrides.rope_theta", "5"]


@pytest.mark.parametrize("name", ["api_k", "hf-tok", "SSH_PASSPHRASE", "access_token"])
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["mask_token", "eos_token", "pard-token", "api_server_count", "max_num_batched_tokens"]
)
def test_names_that_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize("key", ["sekret\r", "sekret\n", " sekret", "sekrét"])
def test_a_key_that_no_request_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError, match="VLLM_API_KEY") as caught:
        build_baseline_command(ServeSpec("d", "t"), RELEASE, None, 1, environ={"VLLM_API_KEY": key})
    assert key.strip() not in str(caught.value)


def test_a_host_that_is_no_name_is_one_line() -> None:
    with pytest.raises(ConfigError, match="serve.host"):
        find_port("a" * 70 + "..b", 0)


def test_an_earlier_run_s_failure_in_the_same_folder_is_not_this_one_s(tmp_path: Path) -> None:
    record_failure(tmp_path, ConfigError("old", where="x", remedy="y"))
    record_failure(tmp_path, ConfigError("new", where="x", remedy="y"))

    assert "new" in json.loads((tmp_path / RESULT).read_text())["reason"]


@pytest.mark.parametrize("left", ["{}", "half", '{"reason": 3}'])
def test_a_damaged_result_hides_no_failure(tmp_path: Path, left: str) -> None:
    (tmp_path / RESULT).write_text(left)
    record_failure(tmp_path, ConfigError("new", where="x", remedy="y"))

    assert "new" in json.loads((tmp_path / RESULT).read_text())["reason"]


def test_a_result_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    (tmp_path / RESULT).mkdir()
    told: list[str] = []
    JobRecord(tmp_path, "draft").save_or_warn("failed", "why", told.append)

    assert "no result.json" in told[0] and str(tmp_path) in told[0]


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_closed_pipe_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write_draft(tmp_path / "draft", draft_config())
    write_target(tmp_path / "target")
    monkeypatch.setattr(sys, "stdout", Closed())

    assert (
        main(["--draft", str(tmp_path / "draft"), "--target", str(tmp_path / "target"), "--print-only", "--port=0"])
        == 1
    )
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: [Errno 32] Broken pipe")
