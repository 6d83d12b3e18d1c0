# SPDX-License-Identifier: Apache-2.0
"""The plain values that flow resolve -> fixup -> export -> command -> launch. All frozen, none imports torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Mapping

from nemo_automodel.files import TensorInfo


class Engine(Enum):
    """What serves the draft."""

    vllm = "vllm"
    sglang = "sglang"


class SharedTensors(Enum):
    """Draft tensors that are byte for byte the target's: `keep` in the export, or `omit` (vLLM uses the target's)."""

    keep = "keep"
    omit = "omit"


class RuntimeKind(Enum):
    """Where vLLM lives: `here` (this interpreter, or `python`), `managed` (an environment per version), `docker`."""

    here = "here"
    managed = "managed"
    docker = "docker"


@dataclass(frozen=True)
class RuntimeSpec:
    """Where vLLM lives, and what that place needs to know."""

    kind: RuntimeKind = RuntimeKind.here
    dir: str | None = None  # managed: where the environments are; None: ~/.cache/train-then-serve/runtimes
    image: str | None = None  # docker; None: vllm/vllm-openai:v<version>
    docker_args: tuple[str, ...] = ()  # docker: more words for `docker run`


@dataclass(frozen=True)
class BenchmarkSpec:
    """What the benchmark asks; `prompts` names files or data sets, each plain or `name=path`; `column` and `split` as
    in training."""

    prompts: str | tuple[str, ...] | None = None
    num_prompts: int = 60
    max_new_tokens: int = 128
    concurrency: tuple[int, ...] = (1,)  # levels; the headline figures are the first one's
    temperature: float = 0.0
    stream: bool = True
    stall_s: float = 600.0  # longest silence in an answer
    baseline: bool = True
    ngram: bool = False
    parity: bool = False
    min_acceptance_length: float | None = None
    min_speedup: float | None = None
    rerun: bool = False  # measure again what an earlier run of the same job measured
    gpu_sets: tuple[str, ...] = ()  # values of CUDA_VISIBLE_DEVICES that the jobs of a sweep share, one each
    column: str | None = None
    split: str = "train"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # the draft was trained with these prompts


@dataclass(frozen=True)
class ServeSpec:
    """One serving job, as parsed from Hydra or from the plain command line; names as in design section 2."""

    checkpoint: str
    target: str
    print_only: bool = False
    benchmark_mode: bool = False
    python: str | None = None
    engine: Engine = Engine.vllm
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)
    host: str = "127.0.0.1"
    port: int = 8000
    tensor_parallel_size: int = 1
    draft_tensor_parallel_size: int | None = None
    num_speculative_tokens: int | None = None
    method: str | None = None
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.8
    max_model_len: int | None = None
    trust_remote_code: bool = False
    served_model_name: str | None = None
    export_dir: str | None = None
    export_shared: SharedTensors = SharedTensors.keep
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    vllm_version: str = "auto"
    benchmark: BenchmarkSpec = field(default_factory=BenchmarkSpec)

    @property
    def speculates(self) -> bool:
        """False for K = 0: the target alone, for comparison."""
        return self.num_speculative_tokens != 0


class Layout(Enum):
    """Who wrote the draft, told by its files."""

    nemo = "NeMo Automodel"
    speculators = "speculators"
    midlayer = "SpecForge / SafeAILab (midlayer.)"
    vllm = "vLLM-ready"


@dataclass(frozen=True)
class ShardTensor:
    """A tensor and the shard file that holds it."""

    info: TensorInfo
    shard: Path

    @property
    def name(self) -> str:
        return self.info.name


@dataclass(frozen=True)
class TargetFacts:
    """What the draft is checked against, read from the target's config.json (nested `text_config` flattened)."""

    path: str
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    config: Mapping[str, Any]
    folder: Path | None = None  # where its config.json lies (a Hub id: in the local cache); None: not read from a file


@dataclass(frozen=True)
class Resolved:
    """A draft found on disk: headers and config, no tensor data."""

    model_dir: Path
    layout: Layout
    config: Mapping[str, Any]
    tensors: tuple[ShardTensor, ...]
    shards: tuple[Path, ...]
    recipe_depth: int | None = (
        None  # ttt_steps of the recipe file beside the checkpoint, which NeMo's config leaves out
    )

    def names(self) -> frozenset[str]:
        return frozenset(t.name for t in self.tensors)


@dataclass(frozen=True)
class Fixup:
    """One change of one config key (or of the tensor set), with its reason."""

    key: str
    old: Any
    new: Any
    why: str


@dataclass(frozen=True)
class Fixups:
    """The whole plan for one export. `config` is the config.json to write; `renames` maps every kept tensor."""

    config: Mapping[str, Any]
    changes: tuple[Fixup, ...]
    renames: Mapping[str, str]  # source name -> exported name, for every tensor that is kept
    dropped: tuple[str, ...]  # source names that are left out
    warnings: tuple[str, ...]
    parallel_drafting: bool  # True: P-EAGLE; False: EAGLE-3
    num_speculative_tokens: int  # K
    copies: Mapping[str, str] = field(default_factory=dict)  # exported name -> source of a tensor that is there twice
    zeros: Mapping[str, tuple[str, tuple[int, ...]]] = field(
        default_factory=dict
    )  # exported name -> dtype and shape of a tensor of zeros that is not in the source
    rows: Mapping[str, int] = field(default_factory=dict)  # exported name -> how many of its first rows are kept


@dataclass(frozen=True)
class Exported:
    """A folder that vLLM loads as `speculative_config.model`."""

    dir: Path
    reused: bool
    digest: str  # of the manifest: source, fixups, layout version


@dataclass(frozen=True)
class LaunchCommand:
    """What would be started. `env` is added to the inherited environment; `unset` names what is taken out of it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    unset: tuple[str, ...]

    def shell(self) -> str:
        """One line for a POSIX shell that does the same; secrets are never in `argv` or `env`."""
        words = ["env", *(f"--unset={name}" for name in self.unset), *(f"{k}={v}" for k, v in self.env.items())]
        prefix = words if len(words) > 1 else []
        return shlex.join([*prefix, *self.argv])


@dataclass(frozen=True)
class ServerInfo:
    """A server that has proven itself ready."""

    url: str
    pid: int
    ready_s: float
