# SPDX-License-Identifier: Apache-2.0
"""The border: a composed Hydra config becomes typed dataclasses, checked; nothing below sees OmegaConf."""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Callable

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from nemo_automodel.components.speculative.serve import options
from nemo_automodel.components.speculative.serve.types import BenchmarkSpec, RuntimeSpec, ServeSpec
from nemo_automodel.config.schema import AppConfig, DraftKind, ServeMode
from nemo_automodel.errors import ConfigError
from nemo_automodel.files import expand_user


def parse_config(config: DictConfig) -> AppConfig:
    """Turn the composed config into an `AppConfig`.

    Merging the plain container into the schema again is what refuses keys added with `+` (Hydra lets them pass).

    Raises:
        ConfigError: unknown key, wrong type, missing value, or a value out of range.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        _refuse_unknown(plain, AppConfig, prefix="")
        app = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(AppConfig), plain))
    except MissingMandatoryValue as error:
        key = error.full_key or "?"
        raise ConfigError("a value is missing", where=key, remedy=f"add {key}=...") from error
    except OmegaConfBaseException as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(first, where=error.full_key or "config", remedy="correct the value") from error
    _check_values(app)
    return app


def _refuse_unknown(plain: Any, schema: type, prefix: str) -> None:
    known = {f.name: f for f in fields(schema)}
    for key, value in plain.items():
        where = f"{prefix}{key}"
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known keys: {', '.join(sorted(known))}"
            raise ConfigError("unknown key", where=where, remedy=hint)
        factory = known[key].default_factory
        if isinstance(value, dict) and isinstance(factory, type) and is_dataclass(factory):
            _refuse_unknown(value, factory, prefix=f"{where}.")


# What rendering a chat template is called with already
RENDERED_WITH = {
    "messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
}  # fmt: skip

# (key, reads the value, is it fine?, what is wanted)
_RULES: list[tuple[str, Callable[[AppConfig], Any], Callable[[Any], bool], str]] = [
    ("train.num_epochs", lambda a: a.train.num_epochs, lambda v: v >= 1, "1 or more"),
    ("train.max_steps", lambda a: a.train.max_steps, lambda v: v is None or v >= 1, "1 or more, or null"),
    ("train.seed", lambda a: a.train.seed, lambda v: v >= 0, "0 or more"),
    ("train.seq_length", lambda a: a.train.seq_length, lambda v: v >= 8, "8 tokens or more"),
    ("train.micro_batch_size", lambda a: a.train.micro_batch_size, lambda v: v >= 1, "1 or more"),
    ("train.grad_accumulation_steps", lambda a: a.train.grad_accumulation_steps, lambda v: v >= 1, "1 or more"),
    ("train.lr", lambda a: a.train.lr, lambda v: v > 0, "a positive number"),
    (
        "train.betas",
        lambda a: a.train.betas,
        lambda v: len(v) == 2 and all(0 <= b < 1 for b in v),
        "two numbers in [0, 1)",
    ),
    ("train.weight_decay", lambda a: a.train.weight_decay, lambda v: v >= 0, "0 or more"),
    ("train.warmup_ratio", lambda a: a.train.warmup_ratio, lambda v: 0 <= v < 1, "in [0, 1)"),
    ("train.min_lr_ratio", lambda a: a.train.min_lr_ratio, lambda v: 0 <= v <= 1, "in [0, 1]"),
    ("train.cache_target_gb", lambda a: a.train.cache_target_gb, lambda v: v >= 0, "0 or more"),
    (
        "draft.init_from_target",
        lambda a: a.draft.init_from_target and a.draft.init_from is not None,
        lambda v: not v,
        "false, or draft.init_from=null",
    ),
    ("train.max_grad_norm", lambda a: a.train.max_grad_norm, lambda v: v > 0, "a positive number"),
    ("train.num_threads", lambda a: a.train.num_threads, lambda v: v is None or v >= 1, "1 or more, or null"),
    ("train.log_every_steps", lambda a: a.train.log_every_steps, lambda v: v >= 1, "1 or more"),
    ("train.save_every_steps", lambda a: a.train.save_every_steps, lambda v: v is None or v >= 1, "1 or more, or null"),
    ("train.decode_prompts", lambda a: a.train.decode_prompts, lambda v: v >= 0, "0 (none) or more"),
    ("train.decode_max_new_tokens", lambda a: a.train.decode_max_new_tokens, lambda v: v >= 1, "1 or more"),
    ("train.decode_every_steps", lambda a: a.train.decode_every_steps, lambda v: v is None or v >= 1, "1 or more"),
    ("data.validation", lambda a: repr(a.data.validation), lambda v: v != "''", "a path or Hub id, or null"),
    (
        "data.chat_template_kwargs",
        lambda a: sorted(RENDERED_WITH & set(a.data.chat_template_kwargs)),
        lambda v: not v,
        "variables of the template's own, such as {enable_thinking: false}; these are set by the rows",
    ),
    (
        "draft.vocab_map",
        lambda a: a.draft.vocab_map if a.draft.init_from is not None else None,
        lambda v: v is None,
        "null with draft.init_from, whose vocabulary is taken",
    ),
    ("data.max_rows", lambda a: a.data.max_rows, lambda v: v is None or v >= 1, "1 or more, or null"),
    ("data.num_workers", lambda a: a.data.num_workers, lambda v: v is None or v >= 1, "1 or more, or null"),
    ("data.max_bad_row_share", lambda a: a.data.max_bad_row_share, lambda v: 0 <= v <= 1, "in [0, 1]"),
    (
        "train.keep_last_checkpoints",
        lambda a: a.train.keep_last_checkpoints,
        lambda v: v is None or v >= 1,
        "1 or more, or null",
    ),
    ("train.nproc_per_node", lambda a: a.train.nproc_per_node, lambda v: v >= 1, "1 or more"),
    ("train.keep_trainer_states", lambda a: a.train.keep_trainer_states, lambda v: v >= 1, "1 or more"),
    ("data.max_validation_rows", lambda a: a.data.max_validation_rows, lambda v: v >= 1, "1 or more"),
    ("draft.num_layers", lambda a: a.draft.num_layers, lambda v: v >= 1, "1 or more"),
    ("draft.sequence_partitions", lambda a: a.draft.sequence_partitions, lambda v: v >= 1, "1 or more"),
    (
        "train.attention",
        lambda a: a.train.attention,
        lambda v: v in ("auto", "chunked", "flex"),
        "auto, chunked or flex",
    ),
    ("draft.num_depths", lambda a: a.draft.num_depths, lambda v: v >= 1, "1 or more"),
    ("draft.ttt_steps", lambda a: a.draft.ttt_steps, lambda v: v >= 1, "1 or more"),
    ("draft.ttt_loss_decay", lambda a: a.draft.ttt_loss_decay, lambda v: 0 < v <= 1, "in (0, 1]"),
    ("draft.down_sample_ratio", lambda a: a.draft.down_sample_ratio, lambda v: 0 < v <= 1, "in (0, 1]"),
    ("draft.down_sample_ratio_min", lambda a: a.draft.down_sample_ratio_min, lambda v: 0 < v <= 1, "in (0, 1]"),
    ("draft.draft_vocab_size", lambda a: a.draft.draft_vocab_size, lambda v: v is None or v >= 1, "1 or more, or null"),
    ("serve.port", lambda a: a.serve.port, lambda v: 0 <= v <= 65535, "0 (pick a free one) to 65535"),
    *((f"serve.{key}", attrgetter(f"serve.{key}"), fine, wanted) for key, fine, wanted in options.RULES),
    ("serve.benchmark.num_prompts", lambda a: a.serve.benchmark.num_prompts, lambda v: v >= 1, "1 or more"),
    ("serve.benchmark.max_new_tokens", lambda a: a.serve.benchmark.max_new_tokens, lambda v: v >= 1, "1 or more"),
    (
        "serve.benchmark.concurrency",
        lambda a: a.serve.benchmark.concurrency,
        lambda v: bool(levels := _levels(v)) and all(isinstance(n, int) and n >= 1 for n in levels),
        "1 or more, or levels such as [1,4,16]",
    ),
    ("serve.benchmark.temperature", lambda a: a.serve.benchmark.temperature, lambda v: v >= 0, "0 or more"),
    ("serve.benchmark.stall_s", lambda a: a.serve.benchmark.stall_s, lambda v: v > 0, "seconds"),
    (
        "serve.benchmark.min_speedup",
        lambda a: _min_speedup(a),
        lambda v: v is None or (isinstance(v, float) and v > 0),
        "a positive number, and leave serve.benchmark.baseline=true",
    ),
    (
        "serve.benchmark.prompts",
        lambda a: a.serve.benchmark.prompts,
        lambda v: v is None or bool(files := _entries(v)) and all(isinstance(file, str) and file for file in files),
        "a file, a list of files, or {name: file}",
    ),
]


def _levels(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _min_speedup(app: AppConfig) -> float | str | None:
    bench = app.serve.benchmark
    return bench.min_speedup if bench.baseline or bench.min_speedup is None else f"{bench.min_speedup} without baseline"


def _entries(value: Any) -> tuple[str, ...]:
    """`serve.benchmark.prompts` as plain or `name=path` entries."""
    if isinstance(value, dict):
        return tuple(f"{name}={path}" for name, path in value.items())
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _check_values(app: AppConfig) -> None:
    if app.train.enabled and not app.data.train:
        raise ConfigError(
            "no chats to train on", where="data.train", remedy="add data.train=PATH, or train.enabled=false"
        )
    for key, read, fine, wanted in _RULES:
        value = read(app)
        options.refuse(key, value, fine, wanted)
    if app.draft.norm_output and app.draft.kind is DraftKind.peagle:
        raise ConfigError(
            "a P-EAGLE draft feeds nothing back", where="draft.norm_output", remedy="leave it at false, or draft=eagle3"
        )
    if app.draft.sequence_partitions > 1 and app.draft.kind is DraftKind.eagle3:
        raise ConfigError(
            "EAGLE-3's steps follow from each other: they are not computed in parts", where="draft.sequence_partitions",
            remedy="leave it at 1; a smaller train.micro_batch_size or draft.ttt_steps takes less memory",
        )  # fmt: skip


def with_absolute_paths(app: AppConfig, base_dir: Path) -> AppConfig:
    """Local paths counted from `base_dir`, whatever the working directory becomes (`hydra.job.chdir=true`).

    What is not there stays as it is: a Hub id, or a mistake that its reader names.
    """

    def absolute(value: str | None) -> str | None:
        if value is None or not value.strip():  # empty: its reader says so; joined, it would be the folder itself
            return value
        place = base_dir / expand_user(value)
        return str(place) if place.exists() else value

    def absolute_prompts(value: Any) -> Any:
        return value if value is None else [absolute_entry(entry) for entry in _entries(value)]

    def absolute_entry(entry: str) -> str:
        name, equals, path = entry.partition("=")
        whole = absolute(entry)  # a path with `=` in it is no name=path
        return f"{name}={absolute(path)}" if equals and whole == entry else whole

    return replace(
        app,
        target=replace(app.target, path=absolute(app.target.path)),
        data=replace(app.data, train=absolute(app.data.train), validation=absolute(app.data.validation)),
        draft=replace(app.draft, init_from=absolute(app.draft.init_from), vocab_map=absolute(app.draft.vocab_map)),
        train=replace(app.train, resume=absolute(app.train.resume) if app.train.resume != "LATEST" else "LATEST"),
        serve=replace(
            app.serve,
            target=absolute(app.serve.target),
            python=absolute(app.serve.python),
            benchmark=replace(app.serve.benchmark, prompts=absolute_prompts(app.serve.benchmark.prompts)),
        ),
    )


def build_serve_spec(app: AppConfig, *, checkpoint: str, base_dir: Path) -> ServeSpec:
    """The serving job of this config. A relative `export_dir` counts from `base_dir`."""
    serve = app.serve
    return ServeSpec(
        checkpoint=checkpoint,
        target=serve.target or app.target.path,
        print_only=serve.print_only,
        benchmark_mode=serve.mode is ServeMode.benchmark,
        python=serve.python,
        engine=serve.engine,
        runtime=_runtime_spec(app, base_dir),
        host=serve.host,
        port=serve.port,
        tensor_parallel_size=serve.tensor_parallel_size,
        draft_tensor_parallel_size=serve.draft_tensor_parallel_size,
        num_speculative_tokens=serve.num_speculative_tokens,
        method=serve.method,
        dtype=serve.dtype,
        gpu_memory_utilization=serve.gpu_memory_utilization,
        max_model_len=serve.max_model_len,
        trust_remote_code=serve.trust_remote_code or app.target.trust_remote_code,
        served_model_name=serve.served_model_name,
        export_dir=None if serve.export_dir is None else str(base_dir / expand_user(serve.export_dir)),
        export_shared=serve.export_shared,
        extra_args=serve.extra_args,
        env=serve.env,
        vllm_version=serve.vllm.version,
        benchmark=_benchmark_spec(app),
    )


def _runtime_spec(app: AppConfig, base_dir: Path) -> RuntimeSpec:
    runtime = app.serve.runtime
    place = None if runtime.dir is None else str((base_dir / expand_user(runtime.dir)).absolute())
    return RuntimeSpec(runtime.kind, place, runtime.image, tuple(runtime.docker_args))


def _prompts(value: Any) -> str | tuple[str, ...] | None:
    return value if value is None or isinstance(value, str) else _entries(value)


def _benchmark_spec(app: AppConfig) -> BenchmarkSpec:
    bench, data = app.serve.benchmark, app.data
    return BenchmarkSpec(
        prompts=_prompts(bench.prompts) or data.validation,
        num_prompts=bench.num_prompts,
        max_new_tokens=bench.max_new_tokens,
        concurrency=_levels(bench.concurrency),
        temperature=bench.temperature,
        stream=bench.stream,
        stall_s=bench.stall_s,
        baseline=bench.baseline,
        ngram=bench.ngram,
        parity=bench.parity,
        min_acceptance_length=bench.min_acceptance_length,
        min_speedup=bench.min_speedup,
        rerun=bench.rerun,
        gpu_sets=tuple(bench.gpu_sets),
        column=data.column,
        split=data.validation_split or data.split,
        chat_template_kwargs=data.chat_template_kwargs,
    )
