# SPDX-License-Identifier: Apache-2.0
"""Secrets typed as Hydra overrides are refused before Hydra writes them to .hydra/*.yaml."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nemo_automodel.components.speculative.serve.secret_names import refuse_secret_config, refuse_secret_overrides
from nemo_automodel.errors import ConfigError

VALUE = "sk-very-secret"


@pytest.mark.parametrize(
    ("argument", "where"),
    [
        (f"+serve.env.VLLM_API_KEY={VALUE}", "serve.env.VLLM_API_KEY"),
        (f"++serve.env.AWS_SECRET_ACCESS_KEY={VALUE}", "serve.env.AWS_SECRET_ACCESS_KEY"),
        (f"+serve.env.GITHUB_PAT={VALUE}", "serve.env.GITHUB_PAT"),
        (f"serve.extra_args.api_key={VALUE}", "serve.extra_args.api_key"),
        (f"+serve.extra_args.api-key={VALUE}", "serve.extra_args.api-key"),
        (f"serve.extra_args={{api-key: {VALUE}, max_num_seqs: 8}}", "serve.extra_args.api-key"),
        (f"serve.env={{HF_TOKEN: {VALUE}}}", "serve.env.HF_TOKEN"),
        (f"serve={{env: {{HF_TOKEN: {VALUE}}}}}", "serve.env.HF_TOKEN"),
        (f"serve.env={{A: 1}},{{HF_TOKEN: {VALUE}}}", "serve.env.HF_TOKEN"),
        (f"+serve.extra_args.x={{list: [{{password: {VALUE}}}]}}", "serve.extra_args.x.list.password"),
        (f"+hydra.job.env_set.HF_TOKEN={VALUE}", "hydra.job.env_set.HF_TOKEN"),
        (f"+serve.api_key='{VALUE}'", "serve.api_key"),
        (f"+hf_token={VALUE}", "hf_token"),
        (f"serve.runtime.docker_args=[-e,VLLM_API_KEY={VALUE}]", "serve.runtime.docker_args.VLLM_API_KEY"),
        (f"serve.runtime.docker_args=['-e','VLLM_API_KEY={VALUE}']", "serve.runtime.docker_args.VLLM_API_KEY"),
        (f"serve.runtime.docker_args=['--env=VLLM_API_KEY={VALUE}']", "serve.runtime.docker_args.VLLM_API_KEY"),
        (f"serve.runtime.docker_args=['--api-key','{VALUE}']", "serve.runtime.docker_args.api-key"),
        (f"serve.runtime.docker_args=['-H','Authorization: {VALUE}']", "serve.runtime.docker_args.Authorization"),
        (f'serve.extra_args.hf_overrides=\'{{"api_key": "{VALUE}"}}\'', "serve.extra_args.hf_overrides.api_key"),
        (f"serve.env.https_proxy=http://me:{VALUE}@proxy:3128", "serve.env.https_proxy"),
        (f"serve.extra_args={{api-key: {VALUE}", "serve.extra_args.api-key"),  # not closed: Hydra would show it all
    ],
)
def test_a_secret_is_refused_by_name_and_never_shown(argument: str, where: str) -> None:
    with pytest.raises(ConfigError, match="in the shell|seen by everybody") as caught:
        refuse_secret_overrides(["-cn", "quickstart", "train.enabled=false", argument])
    assert caught.value.where == where
    assert ("in the shell" in caught.value.remedy) is not where.endswith("password")  # nothing reads a PASSWORD
    assert VALUE not in str(caught.value) and VALUE not in repr(caught.value.__cause__)


def test_everything_else_passes() -> None:
    refuse_secret_overrides([
        "-m", "--config-name=quickstart", "serve.num_speculative_tokens=2,4", "+serve.env.HF_HUB_OFFLINE=1",
        "+serve.extra_args.max_num_batched_tokens=512", "serve.extra_args={max_num_seqs: 8, served: 'a token: b'}",
        "draft.mask_token_id=3", "serve/tp=tp2", "serve.checkpoint='a b=c'", "~serve.env.HF_TOKEN",
        "serve.benchmark.max_new_tokens=8", "serve.env={unbalanced", "serve.runtime.docker_args=['-e','VLLM_API_KEY']",
        "serve.env.HF_ENDPOINT=http://127.0.0.1:9", "serve.checkpoint=/runs/api_key/epoch_1",
    ])  # fmt: skip


def test_a_configuration_file_with_a_secret_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match="in the shell") as caught:
        refuse_secret_config({"serve": {"env": {"A": "1", "VLLM_API_KEY": VALUE}}, "train": {"lr": 1.0}})
    assert caught.value.where == "serve.env.VLLM_API_KEY" and VALUE not in str(caught.value)
    refuse_secret_config({"serve": {"env": {"A": "1"}, "benchmark": {"max_new_tokens": 3}}})


def test_hydra_is_asked_only_where_there_is_something_to_read() -> None:
    code = (
        "import sys\n"
        "from nemo_automodel.components.speculative.serve.secret_names import refuse_secret_overrides\n"
        "refuse_secret_overrides(['train.lr=1', 'serve.port=0'])\n"
        "print([name for name in ('hydra', 'omegaconf', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
