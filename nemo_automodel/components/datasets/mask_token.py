# SPDX-License-Identifier: Apache-2.0
"""The token that stands in the empty slots of a P-EAGLE draft: it must exist, and the data must never use it."""

from __future__ import annotations

from typing import Any

from nemo_automodel.components.datasets.encoded_rows import EncodedRows
from nemo_automodel.errors import ConfigError

MASK_TOKEN = "<|mask|>"


def resolve_mask_token_id(tokenizer: Any, configured: int | None) -> int:
    """The configured id, else the id of `<|mask|>` in the target's vocabulary.

    Raises:
        ConfigError: neither is there.
    """
    if configured is not None:
        return configured
    found = tokenizer.get_vocab().get(MASK_TOKEN)
    if found is None:
        raise ConfigError(
            f"no mask token id is set, and the target's tokenizer has no {MASK_TOKEN}",
            where="draft.mask_token_id",
            remedy="set draft.mask_token_id=ID to a token id that text never contains (a reserved or padding row)",
        )
    return found


def check_mask_token_unused(rows: EncodedRows, mask_token_id: int, *, where: str) -> None:
    """Raises ConfigError when a row contains the mask token: the draft could not tell a slot from a real token."""
    number = rows.first_row_with(lambda ids: ids == mask_token_id)
    if number is not None:
        raise ConfigError(
            f"the mask token id {mask_token_id} occurs in the data ({where}, row {number})",
            where="draft.mask_token_id",
            remedy="set draft.mask_token_id=ID to a token id that the data never uses",
        )
