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

from nemo_automodel.components.speculative.serve.types import Engine, RuntimeKind, SharedTensors


class DraftKind(Enum):
    """Which drafting method is trained."""

    peagle = "peagle"  # K tokens in one forward
    eagle3 = "eagle3"  # one token per forward, fed back K times


class ServeMode(Enum):
    """`foreground`: serve for good. `benchmark`: start, ask, measure, stop."""

    foreground = "foreground"
    benchmark = "benchmark"


class Precision(Enum):
    """Arithmetic of training. `auto`: bf16 on a GPU, fp32 on a CPU."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class OptimizerKind(Enum):
    """`muon`: AdamW for head, embeddings and norms, Muon for the matrices between."""

    adamw = "adamw"
    muon = "muon"


@dataclass
class TargetConfig:
    """The frozen model that the draft speculates for."""

    path: str = MISSING  # a local folder or a Hub id
    trust_remote_code: bool = False


@dataclass
class DataConfig:
    """Chat rows, best answered by the target itself."""

    train: Optional[str] = None  # .jsonl, .parquet, a folder of them, a `datasets` folder, or a Hub id; needed to train
    validation: Optional[str] = None  # the same, held out of training
    split: str = "train"  # split of a Hub data set
    validation_split: Optional[str] = None  # split of the validation rows; null: as `split`
    column: Optional[str] = None  # the field with the turns; null: messages, conversations, or a pair: docs/data.md
    max_rows: Optional[int] = None
    max_validation_rows: int = 64
    max_bad_row_share: float = 0.01  # bad rows are dropped and named; more of them than this end the run; 0: any does
    mask_reasoning_content: bool = False  # true: thinking between <think> tags is not trained on
    chat_template_kwargs: Dict[str, Any] = field(default_factory=dict)  # e.g. {enable_thinking: false}
    packing: bool = False  # true: several rows in one line of seq_length tokens; none of them sees another
    cache_dir: Optional[str] = None  # tokenised rows; null: ~/.cache/train-then-serve/tokens; none: no cache
    num_workers: Optional[int] = None  # processes that tokenise; null: one per core once it takes over 10 s


@dataclass
class DraftConfig:
    """Shape of the draft and of its training signal."""

    kind: DraftKind = DraftKind.peagle
    init_from: Optional[str] = None  # weights to start from: a run, an epoch_* folder, LATEST or a model/ folder
    num_layers: int = 2
    num_depths: int = 4  # P-EAGLE's K: tokens drafted in one forward, depth 0 included
    down_sample_ratio: float = 0.8  # P-EAGLE: depth d keeps max(ratio**d, ratio_min) of the supervised positions
    down_sample_ratio_min: float = 0.2
    mask_token_id: Optional[int] = None  # P-EAGLE; null: read from the target's tokenizer ("<|mask|>"), else refused
    ttt_steps: int = 7  # EAGLE-3's K: steps that training feeds the draft its own states
    ttt_loss_decay: float = 0.8  # EAGLE-3: step s weighs this to the power of s
    norm_output: bool = False  # EAGLE-3: the state after the last norm is fed back, not the one before (vLLM >= 0.22)
    fc_norm: bool = False  # a norm for each of the three aux states before fc (vLLM >= 0.22)
    draft_vocab_size: Optional[int] = None  # null or the target's size: full vocabulary
    vocab_map: Optional[str] = None  # take the reduced vocabulary of this draft; null: the most frequent tokens
    aux_layer_ids: Optional[List[int]] = (
        None  # k = the residual stream that enters layer k; null: 2, n//2, n-3 made distinct
    )
    freeze_embeddings: bool = False
    init_from_target: bool = False  # the first layer starts as the target's last one (targets of Llama's kind)
    sequence_partitions: int = 1  # P-EAGLE: parts computed one after the other; less memory, the same gradient

    @property
    def trained_depth(self) -> int:
        """K of this kind: what serving takes for num_speculative_tokens unless told otherwise."""
        return self.num_depths if self.kind is DraftKind.peagle else self.ttt_steps


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
    optimizer: OptimizerKind = OptimizerKind.adamw  # muon learns more per token, at a higher cost per step
    lr: float = 1e-4
    betas: List[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup_ratio: float = 0.015  # of all optimiser steps
    min_lr_ratio: float = 0.0  # the cosine decay ends at lr * this
    max_grad_norm: float = 1.0
    precision: Precision = Precision.auto
    attention: str = "auto"  # P-EAGLE: chunked, flex (flex_attention, GPUs only), auto: flex where it can run
    nproc_per_node: int = 1  # training processes here, one per GPU; each takes grad_accumulation_steps of its own
    cache_target_gb: float = 0.0  # host memory for the target's states: later epochs do not run it; 0: off
    num_threads: Optional[int] = None  # CPU threads of each process; null: torch's own choice
    resume: Optional[str] = None  # LATEST, or the path of a run or of one checkpoint
    log_every_steps: int = 10
    save_every_steps: Optional[int] = None  # besides the end of each epoch
    decode_prompts: int = 16  # held-out prompts decoded with the target at each epoch's end: the true length; 0: none
    decode_max_new_tokens: int = 128
    decode_every_steps: Optional[int] = None  # besides the end of each epoch
    keep_trainer_states: int = 2  # the newest so many checkpoints can be resumed; older ones keep their weights only
    keep_last_checkpoints: Optional[int] = None  # older ones are removed, LATEST and BEST never; null: all stay
    tensorboard: Optional[bool] = None  # null: when the package tensorboard is installed
    wandb_project: Optional[str] = None  # also report to W&B (needs the package wandb)


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

    prompts: Any = None  # a file, [a.jsonl,b.jsonl] or {name: a.jsonl}: docs/measuring.md; null: data.validation
    num_prompts: int = 60
    max_new_tokens: int = 128
    concurrency: Any = 1  # conversations at a time, or levels of it: [1,4,16]; the first level gives the headline
    temperature: float = 0.0  # above 0 no text is compared and nothing is predicted
    stream: bool = True  # false: no time to first token, no inter-token latency, a little less work for the client
    stall_s: float = 600.0  # a server that is silent for so long in an answer has failed
    baseline: bool = True  # run the same prompts on a server without speculation, for the speedup
    ngram: bool = False  # and on a server that speculates by n-gram lookup
    parity: bool = False  # predict drafts and accepted tokens with the reference decoder (needs torch and the target)
    min_acceptance_length: Optional[float] = None  # a gate: below it the run ends with exit code 3
    min_speedup: Optional[float] = None  # another: output tokens/s over those of the baseline
    rerun: bool = False  # true: a job that is done already (hydra.sweep.dir=OLD) is measured again
    gpu_sets: List[str] = field(default_factory=list)  # jobs side by side take one each: ["0","1"] or ["0,1","2,3"]
    during_training: bool = False  # true: serve and ask each new checkpoint while training goes on: docs/training.md
    update_best: bool = False  # true: at the end of a sweep BEST, beside LATEST, points at the best checkpoint


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
    export_shared: SharedTensors = SharedTensors.keep  # omit: tensors equal to the target's, which vLLM then shares
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
