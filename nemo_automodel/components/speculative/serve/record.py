# SPDX-License-Identifier: Apache-2.0
"""`result.json`: one per job, written on failure too and before a foreground launch (keys: design section 3)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable

from nemo_automodel.components.speculative.serve.types import Exported, Fixups, LaunchCommand, ServerInfo
from nemo_automodel.errors import PreflightError, UserError
from nemo_automodel.files import read_json, write_json
from nemo_automodel.provenance import versions

RESULT = "result.json"
TRAIN = "train"
OURS = ("train-then-serve", "torch", "transformers")  # vLLM's version is that of the interpreter that serves


class JobRecord:
    """What is known of one job so far; `save` writes it whole, or not at all when there is no folder for it."""

    def __init__(self, out_dir: Path | None, checkpoint: str) -> None:
        self._out_dir = out_dir
        self.stage = "release"
        self._value: dict[str, Any] = {
            "status": "failed",
            "stage": self.stage,
            "reason": None,
            "checkpoint": checkpoint,
            "export": None,
            "fixups": [],
            "warnings": [],
            "command": None,
            "server": None,
            "benchmark": None,
            "versions": versions(OURS) | {"vllm": None, "vllm_facts": None},
        }

    def checkpoint(self, model_dir: Path) -> None:
        self._value["checkpoint"] = str(model_dir)

    def vllm(self, installed: str | None, facts: str) -> None:
        """The installed version, and the minor whose facts were used."""
        self._value["versions"] |= {"vllm": installed, "vllm_facts": facts}

    def fixups(self, fixups: Fixups) -> None:
        self._value["fixups"] = [asdict(change) for change in fixups.changes]

    def warn(self, *warnings: str) -> None:
        self._value["warnings"] += warnings

    def exported(self, exported: Exported) -> None:
        self._value["export"] = {"dir": str(exported.dir), "reused": exported.reused, "digest": exported.digest}

    def command(self, command: LaunchCommand) -> None:
        self._value["command"] = {"argv": list(command.argv), "env": dict(command.env), "shell": command.shell()}

    def server(self, server: ServerInfo) -> None:
        self._value["server"] = asdict(server)

    def benchmark(self, benchmark: dict[str, Any]) -> None:
        self._value["benchmark"] = benchmark

    def save(self, status: str, reason: str | None = None) -> None:
        """Write result.json atomically with this status.

        Raises:
            PreflightError: it cannot be written.
        """
        self._value |= {"status": status, "stage": self.stage, "reason": reason}
        if self._out_dir is None:
            return
        try:
            self._out_dir.mkdir(parents=True, exist_ok=True)
            write_json(self._out_dir / RESULT, self._value)
        except OSError as error:
            found, remedy = f"no {RESULT}: {error.strerror}", "make room there, or hydra.run.dir=FOLDER elsewhere"
            raise PreflightError(found, where=str(self._out_dir), remedy=remedy) from error

    def save_or_warn(self, status: str, reason: str | None, warn: Callable[[str], None]) -> None:
        """`save` where something matters more: an error that has to be told, a server that runs."""
        try:
            self.save(status, reason)
        except PreflightError as error:
            warn(str(error))


def record_failure(run_dir: Path, error: BaseException, *, stage: str | None = None) -> None:
    """Leave a result.json for a job that failed outside the serve stage; one that tells this very failure stays."""
    if is_recorded(run_dir, error):
        return
    record = JobRecord(run_dir, checkpoint="")
    record.stage = stage or type(error).__name__.removesuffix("Error").lower()
    record.save("failed", reason_of(error))


def is_recorded(run_dir: Path, error: BaseException) -> bool:
    """Whether result.json tells this failure; what an earlier run left in the same folder does not count."""
    try:
        return read_json(run_dir / RESULT).get("reason") == reason_of(error)
    except (OSError, ValueError):
        return False


def record_training(run_dir: Path, checkpoint: Path | None, *, status: str, reason: str | None) -> None:
    """Leave a result.json for a job that ended with its training: "ok", or "failed" with the reason (an interrupted
    one names the checkpoint it saved).
    """
    record = JobRecord(run_dir, str(checkpoint or ""))
    record.stage = TRAIN
    record.save(status, reason)


def reason_of(error: BaseException) -> str:
    """One line: a UserError's own, or the type and message of anything else."""
    return str(error) if isinstance(error, UserError) else " ".join(f"{type(error).__name__}: {error}".split())
