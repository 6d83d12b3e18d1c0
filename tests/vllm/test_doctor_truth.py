# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdicts against a real vLLM: what it lets pass accepts as much as the draft it was made from, and what
it refuses fails or accepts next to nothing. Damaged and disguised copies of a real draft, in one vLLM process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_automodel.components.speculative.serve.doctor import Severity, diagnose
from nemo_automodel.components.speculative.serve.export import export, plan_export
from nemo_automodel.components.speculative.serve.fixup import plan_fixups
from nemo_automodel.components.speculative.serve.resolve import resolve
from nemo_automodel.components.speculative.serve.shared import omit_shared
from nemo_automodel.components.speculative.serve.target_facts import read_target
from nemo_automodel.components.speculative.serve.types import ServeSpec, SharedTensors
from nemo_automodel.components.speculative.serve.vllm_release import release_for

pytestmark = pytest.mark.vllm
K = 4
Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
ATTENTION = "layers.0.self_attn."


def fuse(config: Config, tensors: Tensors) -> None:
    tensors[ATTENTION + "qkv_proj.weight"] = torch.cat([tensors.pop(f"{ATTENTION}{x}_proj.weight") for x in "qkv"])


def pad(config: Config, tensors: Tensors) -> None:
    """As trained for a vocabulary of 520: rows that no token has."""
    config["vocab_size"] = 520
    tensors["embed_tokens.weight"] = torch.cat([tensors["embed_tokens.weight"], torch.ones(8, 128).bfloat16()])


def rebias(config: Config, tensors: Tensors) -> None:
    tensors[ATTENTION + "q_proj.bias"] = torch.zeros(tensors[ATTENTION + "q_proj.weight"].shape[0]).bfloat16()


def disguise(config: Config, tensors: Tensors) -> None:
    """Another trainer's names, a map of floats, an idle bias, ids as text, the target's depth."""
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "model.midlayer.")] = tensors.pop(name)
    tensors["d2t"] = tensors["d2t"].float()
    tensors["fc.bias"] = torch.zeros(128)
    config |= {"num_hidden_layers": 8, "eagle_aux_hidden_state_layer_ids": ["2", "4", "5"]}


def repeat_aux(config: Config, tensors: Tensors) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 4]


def lose(*names: str) -> Callable[[Config, Tensors], None]:
    def edit(config: Config, tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return edit


SERVED: dict[str, Callable[[Config, Tensors], None]] = {
    "as it is": lambda config, tensors: None,
    "without what equals the target's": lambda config, tensors: None,
    "fused": fuse,
    "padded": pad,
    "one bias": rebias,
    "disguised": disguise,
    "without embeddings": lose("embed_tokens.weight", "t2d"),
}
REFUSED: dict[str, tuple[Callable[[Config, Tensors], None], str]] = {
    "no map": (lose("d2t"), "little"),
    "no head": (lose("lm_head.weight"), "little"),
    "no norm": (lose("layers.0.hidden_norm.weight"), "unset"),
    "aux twice": (repeat_aux, "invalid for input of size"),
}


def write(folder: Path, config: Config, tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def exported(draft: Path, target: Path, place: Path, **options: Any) -> Path:
    """Through the doctor, which must let it pass, and the export."""
    spec = ServeSpec(str(draft), str(target), export_dir=str(place), vllm_version="0.32", **options)
    verdict = diagnose(spec, place)
    assert verdict.exit_code == 0, verdict.of(Severity.error)
    found, facts = resolve(str(draft), place), read_target(str(target))
    plan = omit_shared(plan_fixups(found, release_for("0.32"), facts, spec), found, facts, spec)
    return export(plan_export(found, plan, spec, place)).dir


@pytest.fixture(scope="module")
def told(peers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM did with each draft. The refused ones are given to it as they are, in its own names."""
    place = tmp_path_factory.mktemp("truth")
    target = peers / "target"
    ready = exported(peers / "nemo_eagle3", target, place)
    config, tensors = json.loads((ready / "config.json").read_text()), load_file(ready / "model.safetensors")
    folders = {}
    for i, (name, edit) in enumerate(SERVED.items()):
        changed = dict(config), dict(tensors)
        edit(*changed)
        omit = {"export_shared": SharedTensors.omit} if name.startswith("without what") else {}
        folders[name] = exported(write(place / f"s{i}", *changed), target, place / f"e{i}", **omit)
    for i, (name, (edit, _)) in enumerate(REFUSED.items()):
        changed = dict(config), dict(tensors)
        edit(*changed)
        folders[name] = write(place / f"r{i}", *changed)
    verdicts = {
        name: diagnose(ServeSpec(str(folders[name]), str(target), vllm_version="0.32"), place) for name in REFUSED
    }
    assert all(verdict.exit_code == 1 for verdict in verdicts.values())
    job = {
        "target": str(target),
        "prompts": _prompts(peers),
        "max_tokens": 64,
        "stop": [2],
        "drafts": [{"name": name, "dir": str(dir), "parallel": False, "k": K} for name, dir in folders.items()],
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("in_process.py"))],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=400,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert len(lines) == len(folders), done.stderr[-2000:]
    return {line["name"]: line for line in lines}


def _prompts(peers: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(peers / "target")
    rows = [json.loads(line) for line in (peers / "heldout.jsonl").read_text().splitlines()[:6]]
    render = tokenizer.apply_chat_template
    return [render(row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False) for row in rows]


def test_what_the_doctor_lets_pass_accepts_as_much_as_the_original(told: dict[str, dict[str, Any]]) -> None:
    base = told["as it is"]
    assert base["accepted"] / base["drafts"] > 1, base  # 1.8 on all of the held-out prompts
    for name in SERVED:
        assert told[name] == base | {"name": name}


def test_what_it_refuses_fails_or_accepts_next_to_nothing(told: dict[str, dict[str, Any]]) -> None:
    base = told["as it is"]
    for name, (_, why) in REFUSED.items():
        found = told[name]
        if why == "little":
            assert (
                found["error"] is None and found["accepted"] / found["drafts"] < base["accepted"] / base["drafts"] / 3
            )
        elif why == "unset":
            assert found["unset"] == ["model.layers.0.hidden_norm.weight"]
        else:
            assert why in found["error"]
