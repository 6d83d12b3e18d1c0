# SPDX-License-Identifier: Apache-2.0
"""Paths in a sweep: globs are expanded, and any name survives Hydra's override grammar."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

from nemo_automodel.components.speculative.sweep import prepare_arguments, quote_value, refuse_unusable_place
from nemo_automodel.errors import ConfigError

ODD = ["a b", "a=b,c", "it's", "back\\slash", "end\\", "é(x)[y]{z}#", "1e5", "\\'", "a'", 'x"y', "${a}", "tab\tx", "~x"]


@pytest.mark.parametrize("value", ["/plain/path-1.0_x", *(f"/run/{odd}" for odd in ODD), *ODD])
def test_a_quoted_value_comes_back_unchanged(value: str) -> None:
    parsed = OverridesParser.create().parse_override(f"serve.checkpoint={quote_value(value)}").value()
    assert (parsed.text if isinstance(parsed, QuotedString) else parsed) == value


def test_a_glob_becomes_its_folders_in_order_of_steps(tmp_path: Path) -> None:
    for name in ("epoch_0_step_1000", "epoch_0_step_500", "odd, name=1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "LATEST").symlink_to("epoch_0_step_1000")
    (argument,) = prepare_arguments(["serve.checkpoint=glob(checkpoints/*)"], tmp_path)
    override = OverridesParser.create().parse_override(argument)
    values = [getattr(v, "text", v) for v in override.sweep_iterator()]
    assert [Path(str(v)).name for v in values] == ["epoch_0_step_500", "epoch_0_step_1000", "odd, name=1"]


def test_a_glob_without_match_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder matches"):
        prepare_arguments(["serve.checkpoint=glob(nothing/*)"], tmp_path)


def test_other_arguments_are_left_alone(tmp_path: Path) -> None:
    arguments = ["-m", "serve.checkpoint=a,b", "serve.port=glob(*)"]
    assert prepare_arguments(arguments, tmp_path) == arguments


@pytest.mark.parametrize("name", ["1e5", "007", "true", "1_000", "-1", "nan"])
def test_a_folder_named_like_a_number_stays_a_name(name: str) -> None:
    (argument,) = prepare_arguments([f"serve.checkpoint=run,{name}"], Path("."))
    override = OverridesParser.create().parse_override(argument)
    assert [getattr(v, "text", v) for v in override.sweep_iterator()] == ["run", name]


@pytest.mark.parametrize("argument", ["serve.checkpoint='/x/x 1,2,3/d'", 'serve.checkpoint="1",b', "serve.port=1e5"])
def test_what_is_quoted_or_no_path_is_left_alone(argument: str) -> None:
    assert prepare_arguments([argument], Path(".")) == [argument]


def test_a_release_keeps_its_zero() -> None:
    assert prepare_arguments(["serve.vllm.version=0.30"], Path(".")) == ["serve.vllm.version='0.30'"]


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("train.max_stepz=20", "did you mean train.max_steps?"),
        ("serve.benchmark.num_promts=3", "did you mean serve.benchmark.num_prompts?"),
        ("zzz=1", "keys there: target, data, draft, train, serve"),
        ("serve.checkpoint=/odd/k=v", "'serve.checkpoint=\"/odd/k=v\"'"),
        ("serve.checkpoint=/odd/a[1]", "quote it"),
    ],
)
def test_a_mistake_is_told_before_hydra_words_it(argument: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare_arguments([argument], Path("."))
    assert hint in caught.value.remedy


@pytest.mark.parametrize(
    "argument",
    [
        "serve.extra_args.max_num_seqs=8",
        "+serve.env.A=1",
        "serve/tp=tp2",
        "hydra.job.chdir=true",
        "~data.column",
        "draft=peagle",
    ],
)
def test_open_keys_groups_and_hydras_own_pass(argument: str) -> None:
    assert prepare_arguments([argument], Path(".")) == [argument]


def test_an_unknown_recipe_names_those_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "quickstart.yaml").touch()
    with pytest.raises(ConfigError, match="quickstart"):
        refuse_unusable_place(["-cn", "qwen"], tmp_path, tmp_path / "conf")
    refuse_unusable_place(["-cn", "quickstart"], tmp_path, tmp_path / "conf")
    refuse_unusable_place(["-cn", "mine", "--config-dir", "there"], tmp_path, tmp_path / "conf")
