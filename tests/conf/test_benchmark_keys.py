# SPDX-License-Identifier: Apache-2.0
"""`serve.benchmark` as it is typed: files, names, levels, gates."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from nemo_automodel.config.parse import build_serve_spec, parse_config, with_absolute_paths
from nemo_automodel.config.store import register
from nemo_automodel.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"


def bench(base: Path, *overrides: str):
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("quickstart", overrides=[f"serve.benchmark.{text}" for text in overrides])
    app = with_absolute_paths(parse_config(config), base)
    return build_serve_spec(app, checkpoint="c", base_dir=base).benchmark


def test_prompts_are_one_file_several_or_named_ones(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    assert bench(tmp_path).prompts.endswith("heldout.jsonl")  # data.validation
    assert bench(tmp_path, "prompts=a.jsonl").prompts == (a,)
    assert bench(tmp_path, "prompts=[a.jsonl,b.jsonl]").prompts == (a, b)
    assert bench(tmp_path, "prompts={math: a.jsonl, code: org/set}").prompts == (f"math={a}", "code=org/set")
    assert bench(tmp_path, "prompts='math=a.jsonl'").prompts == (f"math={a}",)


def test_concurrency_is_a_number_or_levels(tmp_path: Path) -> None:
    assert bench(tmp_path).concurrency == (1,)
    assert bench(tmp_path, "concurrency=[1,4,16]").concurrency == (1, 4, 16)


@pytest.mark.parametrize(
    "override",
    ["concurrency=0", "concurrency=[]", "concurrency=[1,x]", "prompts=3", "prompts=[]", "temperature=-1", "stall_s=0",
     "min_speedup=0", "num_prompts=0"],
)  # fmt: skip
def test_what_makes_no_sense_names_its_key(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=f"serve.benchmark.{override.partition('=')[0]}"):
        bench(tmp_path, override)


def test_a_speedup_needs_a_baseline(tmp_path: Path) -> None:
    assert bench(tmp_path, "min_speedup=1.2").min_speedup == 1.2
    with pytest.raises(ConfigError, match="without baseline"):
        bench(tmp_path, "min_speedup=1.2", "baseline=false")
