# SPDX-License-Identifier: Apache-2.0
"""The target's tokenizer."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from nemo_automodel.errors import ConfigError


def load_tokenizer(path: str, *, where: str = "target.path", trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder or Hub id. Raises ConfigError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers trips over a damaged file in many ways: KeyError, AttributeError, ...
        reason = str(error) if isinstance(error, (OSError, ValueError)) else repr(error)
        raise ConfigError(
            f"no usable tokenizer at {path!r} ({reason.partition(chr(10))[0]})",
            where=where,
            remedy="put tokenizer.json and tokenizer_config.json beside the target's weights",
        ) from error
