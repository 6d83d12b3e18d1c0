# SPDX-License-Identifier: Apache-2.0
"""Drafts through vLLM's own engine, one after the other in one process: a server costs half a minute, this one second.

Standard input: one JSON object {"target", "prompts": [[token id]], "max_tokens", "stop": [token id], "drafts":
[{"name", "dir", "parallel", "k"}]}. Standard output: one JSON line per draft, {"name", "drafts", "accepted", "unset",
"error"}; `unset` are the draft's parameters that nothing was loaded into.
"""

from __future__ import annotations

import gc
import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
collect, gc.collect = gc.collect, lambda *_: 0  # vLLM collects ten times for each engine: 4 of 5 seconds

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.model_executor.models import llama_eagle3, qwen3_eagle3  # noqa: E402
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # noqa: E402

unset: list[str] = []


def mark(cls: type) -> None:
    """Everything starts as NaN, so that what stays NaN was never loaded (norms start as ones, linears as anything)."""
    load = cls.load_weights

    def load_weights(self, weights):
        for parameter in self.parameters():
            if parameter.is_floating_point():
                parameter.data.fill_(float("nan"))
        return load(self, weights)

    cls.load_weights = load_weights


def watch() -> None:
    load = SpecDecodeBaseProposer.load_model

    def load_model(self, target):
        load(self, target)
        named = self.model.named_parameters()
        unset.extend(name for name, value in named if value.is_floating_point() and value.isnan().any())

    SpecDecodeBaseProposer.load_model = load_model


def serve(job: dict, draft: dict) -> dict:
    unset.clear()
    out = {"name": draft["name"], "drafts": 0, "accepted": 0, "error": None}
    speculative = {"method": "eagle3", "model": draft["dir"], "num_speculative_tokens": draft["k"]}
    if draft["parallel"]:
        speculative["parallel_drafting"] = True
    try:
        engine = LLM(
            model=job["target"],
            speculative_config=speculative,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=64,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            enable_prefix_caching=False,
            dtype="float32",
        )
        sampling = SamplingParams(
            temperature=0, max_tokens=job["max_tokens"], stop_token_ids=job["stop"], detokenize=False
        )
        engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
        counted = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
        out["drafts"] = counted["vllm:spec_decode_num_drafts"]
        out["accepted"] = counted["vllm:spec_decode_num_accepted_tokens"]
        engine.llm_engine.engine_core.shutdown()
    except Exception as error:  # noqa: BLE001 - what vLLM raises is the answer
        out["error"] = f"{type(error).__name__}: {error}"
    return out | {"unset": list(unset)}


def main() -> None:
    torch.set_num_threads(1)
    mark(llama_eagle3.Eagle3LlamaForCausalLM)
    mark(qwen3_eagle3.Eagle3Qwen3ForCausalLM)
    watch()
    job = json.load(sys.stdin)
    for draft in job["drafts"]:
        print(json.dumps(serve(job, draft)), flush=True)


if __name__ == "__main__":
    main()
