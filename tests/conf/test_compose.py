# SPDX-License-Identifier: Apache-2.0
"""Every option of every group composes in every recipe, and a mistake in any place is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_automodel.components.speculative.serve.types import Engine, RuntimeKind, RuntimeSpec
from nemo_automodel.config.parse import build_serve_spec, parse_config, with_absolute_paths
from nemo_automodel.config.schema import AppConfig, DraftKind
from nemo_automodel.config.store import REPO_ROOT, register
from nemo_automodel.errors import ConfigError

CONF = REPO_ROOT / "conf"
RECIPES = sorted(p.stem for p in CONF.glob("*.yaml") if p.stem != "base")
OPTIONS = sorted(
    (str(path.parent.relative_to(CONF)), path.stem)
    for path in CONF.rglob("*.yaml")
    if path.parent != CONF and path.name != "default.yaml"
)
# What a recipe leaves to the user (data.train of llama_peagle).
FILL = {
    "llama_peagle": ["data.train=rows.jsonl"],
    "serve_only": ["target.path=model", "data.train=rows.jsonl"],
    "peagle": ["target.path=model", "data.train=rows.jsonl"],
}


def load(recipe: str, overrides: list[str] = [], conf: Path = CONF) -> AppConfig:
    register()
    with initialize_config_dir(str(conf), version_base="1.3"):
        config = compose(recipe, overrides=[*FILL.get(recipe, []), *overrides])
    return parse_config(config)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_composes(recipe: str) -> None:
    app = load(recipe)
    assert app.target.path and app.data.train
    assert app.serve.enabled is (recipe == "serve_only") and app.serve.host == "127.0.0.1"


@pytest.mark.parametrize(("recipe", "option"), itertools.product(RECIPES, OPTIONS), ids=str)
def test_each_option_composes_in_each_recipe(recipe: str, option: tuple[str, str]) -> None:
    group, name = option
    fill = ["data.train=x.jsonl"] if group == "data" else ["target.path=x"] if group == "target" else []
    app = load(recipe, [f"{group}={name}", *fill])
    assert isinstance(app, AppConfig)


def test_options_of_a_group_set_the_same_keys() -> None:
    groups: dict[str, set[frozenset[str]]] = {}
    for path in (CONF / "serve").rglob("*.yaml"):
        if path.parent.name in ("vllm", "port", "tp", "runtime", "engine"):
            groups.setdefault(path.parent.name, set()).add(frozenset(yaml.safe_load(path.read_text())))
    assert set(groups) == {"vllm", "port", "tp", "runtime", "engine"}
    assert all(len(keys) == 1 for keys in groups.values()), groups


def test_groups_change_what_is_served() -> None:
    app = load("quickstart", ["serve/vllm=v0_16", "serve/port=auto", "serve/tp=tp2"])
    spec = build_serve_spec(app, checkpoint="c", base_dir=Path("/b"))
    assert (spec.vllm_version, spec.port, spec.tensor_parallel_size) == ("0.16", 0, 2)


def test_where_vllm_lives_is_a_group() -> None:
    spec = build_serve_spec(load("quickstart"), checkpoint="c", base_dir=Path("/b"))
    assert (spec.runtime, spec.engine) == (RuntimeSpec(), Engine.vllm)
    app = load(
        "quickstart", ["serve/runtime=docker", "serve.runtime.image=i:v0.31", "serve.runtime.docker_args=['-e','A=b']"]
    )
    spec = build_serve_spec(app, checkpoint="c", base_dir=Path("/b"))
    assert spec.runtime == RuntimeSpec(RuntimeKind.docker, None, "i:v0.31", ("-e", "A=b"))
    app = load("quickstart", ["serve/runtime=managed", "serve.runtime.dir=envs", "serve.engine=sglang"])
    spec = build_serve_spec(app, checkpoint="c", base_dir=Path("/b"))
    assert (spec.runtime, spec.engine) == (RuntimeSpec(RuntimeKind.managed, "/b/envs"), Engine.sglang)


def test_plain_values_win_over_groups() -> None:
    app = load("quickstart", ["serve.port=9000", "serve.tensor_parallel_size=4"])
    assert (app.serve.port, app.serve.tensor_parallel_size) == (9000, 4)


def test_the_qwen_recipe_is_the_published_one() -> None:
    app = load("qwen_peagle_perfectblend")
    assert app.target.path == "Qwen/Qwen3-8B"
    assert (app.data.train, app.data.column) == ("jihwan1205/perfectblend-qwen3-8b-regen", "conversations")
    assert (app.data.max_rows, app.train.seq_length, app.train.num_epochs) == (70000, 4096, 20)
    draft = app.draft
    assert (draft.num_depths, draft.num_layers, draft.mask_token_id, draft.draft_vocab_size) == (8, 4, 151669, 151936)
    assert (draft.down_sample_ratio, draft.down_sample_ratio_min) == (0.8, 0.2)
    assert (app.train.lr, app.train.betas, app.train.warmup_ratio) == (1e-4, [0.9, 0.95], 0.015)


def test_eagle3_is_one_group_apart() -> None:
    plain, other = load("quickstart"), load("quickstart", ["draft=eagle3"])
    assert (plain.draft.kind, plain.draft.trained_depth, plain.draft.num_layers) == (DraftKind.peagle, 4, 2)
    assert (other.draft.kind, other.draft.trained_depth, other.draft.num_layers) == (DraftKind.eagle3, 4, 1)
    assert replace(other, draft=plain.draft) == plain
    assert load("llama_eagle3_perfectblend").draft.trained_depth == 7
    with pytest.raises(ConfigError, match="not computed in parts"):
        load("quickstart", ["draft=eagle3", "draft.sequence_partitions=2"])


@pytest.mark.parametrize(
    "override",
    [
        "serve.prot=1",
        "serve.port=abc",
        "serve.mode=background",
        "serve/tp=tp3",
        "serve/runtime=podman",
        "serve.runtime.kind=venv",
        "serve.engine=trtllm",
        "serve.enabled=maybe",
        "train.precision=fp8",
    ],
)
def test_a_wrong_override_is_refused_by_hydra(override: str) -> None:
    with pytest.raises((HydraException, ConfigCompositionException, OmegaConfBaseException)):
        load("quickstart", [override])


@pytest.mark.parametrize(
    ("override", "where", "hint"),
    [
        ("+serve.prot=1", "serve.prot", "serve.port"),
        ("+zzz=1", "zzz", "known keys"),
        ("+serve.benchmark.num_promts=3", "serve.benchmark.num_promts", "serve.benchmark.num_prompts"),
        ("serve.port=70000", "serve.port", "65535"),
        ("train.micro_batch_size=0", "train.micro_batch_size", "1 or more"),
        ("train.betas=[0.9]", "train.betas", "two numbers"),
        ("draft.ttt_steps=0", "draft.ttt_steps", "1 or more"),
        ("draft.ttt_loss_decay=1.2", "draft.ttt_loss_decay", "(0, 1]"),
        ("draft.norm_output=true", "draft.norm_output", "draft=eagle3"),
        ("data.validation=", "data.validation", "a path or Hub id"),
        ("+data.chat_template_kwargs={tools: []}", "data.chat_template_kwargs", "of the template's own"),
    ],
)
def test_what_hydra_lets_pass_is_refused_at_the_border(override: str, where: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("quickstart", [override])
    assert caught.value.where == where and hint in caught.value.remedy


def test_a_vocabulary_beside_that_of_the_earlier_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft.vocab_map"):
        load("quickstart", ["draft.init_from=/runs/a", "draft.vocab_map=/runs/b"])
    assert load("quickstart", ["draft.vocab_map=/runs/b"]).draft.vocab_map == "/runs/b"


def test_chats_are_needed_to_train_and_only_to_train() -> None:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        training = compose("llama_peagle")
        serving = compose("llama_peagle", overrides=["train.enabled=false", "serve.enabled=true"])
    with pytest.raises(ConfigError) as caught:
        parse_config(training)
    assert caught.value.where == "data.train"
    assert parse_config(serving).data.train is None


def test_a_typo_in_a_group_file_is_refused(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    for path in CONF.rglob("*.yaml"):
        copy = conf / path.relative_to(CONF)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    (conf / "serve/tp/tp2.yaml").write_text("# @package serve\ntensor_paralel_size: 2\n")
    with pytest.raises((HydraException, OmegaConfBaseException)):
        load("quickstart", ["serve/tp=tp2"], conf=conf)


def test_extra_args_and_env_stay_open() -> None:
    app = load("quickstart", ["+serve.extra_args.max_num_batched_tokens=512", "+serve.env.VLLM_LOGGING_LEVEL=ERROR"])
    assert app.serve.extra_args["max_num_batched_tokens"] == 512
    assert app.serve.env["VLLM_LOGGING_LEVEL"] == "ERROR"


def test_paths_count_from_where_the_user_stands(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    app = with_absolute_paths(load("quickstart", ["data.train=rows.jsonl", "target.path=org/model"]), tmp_path)
    assert app.data.train == str(tmp_path / "rows.jsonl")
    assert app.target.path == "org/model", "not there: a Hub id"


def test_the_defaults_of_the_yaml_are_plain_python() -> None:
    app = load("quickstart")
    assert type(app.serve.extra_args) is dict and type(app.train.betas) is list
    assert OmegaConf.is_config(app.serve.extra_args) is False
