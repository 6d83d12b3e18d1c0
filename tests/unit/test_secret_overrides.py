# SPDX-License-Identifier: Apache-2.0
"""Secrets typed as Hydra overrides are refused before Hydra writes them to .hydra/*.yaml."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nemo_automodel.components.speculative.serve.secret_names import refuse_secret_overrides
from nemo_automodel.errors import ConfigError

VALUE = "sk-very-secret"


@pytest.mark.parametrize(
    ("argument", "where"),
    [
        (f"+serve.env.VLLM_API_KEY={VALUE}", "serve.env.VLLM_API_KEY"),
        (f"++serve.env.AWS_SECRET_ACCESS_KEY={VALUE}", "serve.env.AWS_SECRET_ACCESS_KEY"),
        (f"serve.extra_args.api_key={VALUE}", "serve.extra_args.api_key"),
        (f"+serve.extra_args.api-key={VALUE}", "serve.extra_args.api-key"),
        (f"serve.extra_args={{api-key: {VALUE}, max_num_seqs: 8}}", "serve.extra_args.api-key"),
        (f"serve.env={{HF_TOKEN: {VALUE}}}", "serve.env.HF_TOKEN"),
        (f"serve={{env: {{HF_TOKEN: {VALUE}}}}}", "serve.env.HF_TOKEN"),
        (f"serve.env={{A: 1}},{{HF_TOKEN: {VALUE}}}", "serve.env.HF_TOKEN"),
        (f"+serve.extra_args.x={{list: [{{password: {VALUE}}}]}}", "serve.extra_args.x.list.password"),
        (f"+hydra.job.env_set.HF_TOKEN={VALUE}", "hydra.job.env_set.HF_TOKEN"),
        (f"+serve.api_key='{VALUE}'", "serve.api_key"),
    ],
)
def test_a_secret_is_refused_by_name_and_never_shown(argument: str, where: str) -> None:
    with pytest.raises(ConfigError, match="in the shell") as caught:
        refuse_secret_overrides(["-cn", "quickstart", "train.enabled=false", argument])
    assert caught.value.where == where
    assert VALUE not in str(caught.value) and VALUE not in repr(caught.value.__cause__)


def test_everything_else_passes() -> None:
    refuse_secret_overrides([
        "-m", "--config-name=quickstart", "serve.num_speculative_tokens=2,4", "+serve.env.HF_HUB_OFFLINE=1",
        "+serve.extra_args.max_num_batched_tokens=512", "serve.extra_args={max_num_seqs: 8, served: 'a token: b'}",
        "draft.mask_token_id=3", "serve/tp=tp2", "serve.checkpoint='a b=c'", "~serve.env.HF_TOKEN",
        "serve.benchmark.max_new_tokens=8", "serve.env={unbalanced",
    ])  # fmt: skip


def test_hydra_is_asked_only_where_there_is_something_to_read() -> None:
    code = (
        "import sys\n"
        "from nemo_automodel.components.speculative.serve.secret_names import refuse_secret_overrides\n"
        "refuse_secret_overrides(['train.lr=1', 'serve.port=0'])\n"
        "print([name for name in ('hydra', 'omegaconf', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
