# SPDX-License-Identifier: Apache-2.0
"""The typed configuration: this file owns every key, its default, its type and one line of help.

OmegaConf reads these classes as its schema (so a wrong key or type fails before our code), and
`nemo_automodel.config.parse` turns the composed config into instances of them. YAML says only what differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Dict, List, Optional

from omegaconf import MISSING

from nemo_automodel.components.speculative.serve.types import Engine, RuntimeKind


class DraftKind(Enum):
    """Which drafting method is trained."""

    peagle = "peagle"


class ServeMode(Enum):
    """`foreground`: serve for good. `benchmark`: start, ask, measure, stop."""

    foreground = "foreground"
    benchmark = "benchmark"


class Precision(Enum):
    """Arithmetic of training. `auto`: bf16 on a GPU, fp32 on a CPU."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass
class TargetConfig:
    """The frozen model that the draft speculates for."""

    path: str = MISSING  # a local folder or a Hub id
    trust_remote_code: bool = False


@dataclass
class DataConfig:
    """Chat rows, best answered by the target itself."""

    train: Optional[str] = None  # .jsonl, .parquet, a `datasets` folder on disk, or a Hub id; needed to train
    validation: Optional[str] = None  # the same, held out of training
    split: str = "train"  # split of a Hub data set
    validation_split: Optional[str] = None  # split of the validation rows; null: as `split`
    column: Optional[str] = None  # `messages` or `conversations`; null: whichever is there
    max_rows: Optional[int] = None
    max_validation_rows: int = 64
    max_bad_row_share: float = 0.01  # bad rows are dropped and named; more of them than this end the run; 0: any does
    mask_reasoning_content: bool = False  # true: thinking between <think> tags is not trained on
    chat_template_kwargs: Dict[str, Any] = field(default_factory=dict)  # e.g. {enable_thinking: false}


@dataclass
class DraftConfig:
    """Shape of the draft and of its training signal."""

    kind: DraftKind = DraftKind.peagle
    num_layers: int = 2
    num_depths: int = 4  # K: tokens drafted in one forward, depth 0 included
    down_sample_ratio: float = 0.8  # COD: depth d keeps max(ratio**d, ratio_min) of the supervised positions
    down_sample_ratio_min: float = 0.2
    mask_token_id: Optional[int] = None  # null: read from the target's tokenizer ("<|mask|>"), else refused
    draft_vocab_size: Optional[int] = None  # null or the target's size: full vocabulary
    aux_layer_ids: Optional[List[int]] = (
        None  # k = the residual stream that enters layer k; null: 2, n//2, n-3 made distinct
    )
    freeze_embeddings: bool = False


@dataclass
class TrainConfig:
    """The training run."""

    enabled: bool = True
    num_epochs: int = 1
    max_steps: Optional[int] = None  # optimiser steps; null: num_epochs decides
    seed: int = 42
    seq_length: int = 2048  # tokens; longer rows are cut
    micro_batch_size: int = 1  # rows
    grad_accumulation_steps: int = 1
    lr: float = 1e-4
    betas: List[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup_ratio: float = 0.015  # of all optimiser steps
    min_lr_ratio: float = 0.0  # the cosine decay ends at lr * this
    max_grad_norm: float = 1.0
    precision: Precision = Precision.auto
    num_threads: Optional[int] = None  # CPU threads of the worker; null: torch's own choice
    resume: Optional[str] = None  # LATEST, or the path of a run or of one checkpoint
    log_every_steps: int = 10
    save_every_steps: Optional[int] = None  # besides the end of each epoch
    keep_trainer_states: int = 2  # the newest so many checkpoints can be resumed; older ones keep their weights only


@dataclass
class VllmConfig:
    """Set by the group serve/vllm."""

    version: str = "auto"  # "auto": read from the interpreter that will run vLLM, without importing it


@dataclass
class RuntimeConfig:
    """Where vLLM lives; `kind` is set by the group serve/runtime."""

    kind: RuntimeKind = RuntimeKind.here  # here: serve.python or this interpreter; managed: made on first use; docker
    dir: Optional[str] = None  # managed: null: $TRAIN_THEN_SERVE_RUNTIMES, or ~/.cache/train-then-serve/runtimes
    image: Optional[str] = None  # docker: null: vllm/vllm-openai:v<version>
    docker_args: List[str] = field(default_factory=list)  # docker: more words for `docker run`: [--shm-size, 8g]


@dataclass
class BenchmarkConfig:
    """What `serve.mode=benchmark` asks the server."""

    prompts: Optional[str] = None  # chat rows (last assistant turn left out); null: data.validation
    num_prompts: int = 60
    max_new_tokens: int = 128
    concurrency: int = 1
    baseline: bool = True  # run the same prompts on a server without speculation, for the speedup
    ngram: bool = False  # and on a server that speculates by n-gram lookup
    parity: bool = False  # predict drafts and accepted tokens with the reference decoder (needs torch and the target)
    min_acceptance_length: Optional[float] = None  # a gate: below it the run ends with exit code 3


@dataclass
class ServeConfig:
    """The serve stage: resolve -> fixup -> export -> launch."""

    enabled: bool = False
    print_only: bool = False  # run resolve, plan and command, print, write nothing, start nothing
    mode: ServeMode = ServeMode.foreground
    checkpoint: str = "LATEST"  # run dir, epoch_* dir, model dir, Hub id, or LATEST
    target: Optional[str] = None  # null: target.path
    engine: Engine = Engine.vllm  # sglang: EAGLE-3 drafts of one layer
    python: Optional[str] = None  # interpreter that has vLLM; null: this one
    host: str = "127.0.0.1"
    port: int = 8000  # 0: pick a free one
    tensor_parallel_size: int = 1
    draft_tensor_parallel_size: Optional[int] = None
    num_speculative_tokens: Optional[int] = None  # null: the draft's trained depth
    method: Optional[str] = None  # null: read from the draft
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.8
    max_model_len: Optional[int] = None
    trust_remote_code: bool = False
    served_model_name: Optional[str] = None
    export_dir: Optional[str] = None  # null: vllm_export/ beside the draft's weights
    extra_args: Dict[str, Any] = field(
        default_factory=dict
    )  # any other vLLM flag: {max_num_seqs: 8, enforce_eager: true}
    env: Dict[str, str] = field(default_factory=dict)  # environment of the server
    vllm: VllmConfig = field(default_factory=VllmConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)


@dataclass
class AppConfig:
    """Everything one command needs."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
