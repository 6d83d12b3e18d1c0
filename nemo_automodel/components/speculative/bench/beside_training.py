# SPDX-License-Identifier: Apache-2.0
"""Served benchmarks of a run's checkpoints while the run goes on: one at a time, the newest first.

    checkpoints/epoch_1_step_500/ appears
        -> checkpoints_bench/epoch_1_step_500/{job.json, benchmark.log, result.json, ...}
        -> checkpoints_bench/{leaderboard.*, report.html}, and a line on stderr

Each is a process of its own under the supervisor, which ends it with us, however we end. Nothing that goes wrong here
ends the training.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Callable, Mapping

import nemo_automodel
from nemo_automodel.components.speculative.bench.gpu_sets import VISIBLE
from nemo_automodel.components.speculative.serve.command import ALWAYS_UNSET
from nemo_automodel.components.speculative.serve.gpus import visible_gpus
from nemo_automodel.components.speculative.serve.launch import stopping_servers
from nemo_automodel.components.speculative.serve.process import LogFile, ServerProcess
from nemo_automodel.components.speculative.serve.record import RESULT
from nemo_automodel.components.speculative.serve.types import LaunchCommand, ServeSpec
from nemo_automodel.errors import ConfigError, LaunchError
from nemo_automodel.files import read_json

FOLDER = "checkpoints_bench"
JOB_MODULE = "nemo_automodel.components.speculative.bench.checkpoint_job"
POLL_S = 1.0
GRACE_S = 60.0  # for a benchmark that is cancelled to stop its server
WHERE = "serve.benchmark.during_training"
Say = Callable[[str], None]


class BesideTraining:
    """A context around training; `finish` when training has ended well. Leaving it cancels what still runs."""

    def __init__(self, spec: ServeSpec, *, run_dir: Path, base_dir: Path, say: Say) -> None:
        """`spec`: how a checkpoint is served and asked; its own checkpoint, port and gates do not count."""
        bench = replace(
            spec.benchmark, min_acceptance_length=None, min_speedup=None, gpu_sets=spec.benchmark.gpu_sets[:1]
        )
        self._spec = replace(spec, benchmark_mode=True, print_only=False, port=0, export_dir=None, benchmark=bench)
        self._run_dir, self._base_dir, self._say = run_dir, base_dir, say
        self._taken = set(self._checkpoints())  # of an earlier run in this folder
        self._closing, self._cancelled = threading.Event(), threading.Event()
        self._measure_last = False
        self._thread = threading.Thread(target=self._work, name="checkpoint-benchmarks")

    def __enter__(self) -> BesideTraining:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._cancelled.set()
        self._closing.set()
        self._thread.join()

    def finish(self, *, measure_last: bool) -> None:
        """Wait for the benchmark that runs; of those that wait only the newest is still made, with `measure_last`.

        Raises:
            Interrupted: SIGINT or SIGTERM while waiting.
        """
        self._measure_last = measure_last
        self._closing.set()
        with stopping_servers():
            if self._thread.is_alive():
                self._say("training has ended; waiting for the benchmark of a checkpoint")
            while self._thread.is_alive():
                self._thread.join(POLL_S)
        if (self._root / "report.html").is_file():
            self._say(f"checkpoints as served: {self._root / 'report.html'}")

    @property
    def _root(self) -> Path:
        return self._run_dir / FOLDER

    def _checkpoints(self) -> list[Path]:
        """Finished ones (they are renamed into place), oldest first."""
        found = [path.parents[1] for path in self._run_dir.glob("checkpoints/epoch_*_step_*/model/config.json")]
        return sorted((path for path in found if not path.is_symlink()), key=_step)

    def _work(self) -> None:
        while not self._cancelled.is_set():
            closing = self._closing.is_set()  # read before looking: the last checkpoint is there by then
            checkpoint = self._next(closing)
            if checkpoint is not None:
                self._taken.add(checkpoint)
                self._measure(checkpoint)
            elif closing:
                return
            else:
                self._closing.wait(POLL_S)

    def _next(self, closing: bool) -> Path | None:
        found = self._checkpoints()
        if closing:
            found = found[-1:] if self._measure_last else []
        return next((path for path in reversed(found) if path not in self._taken), None)

    def _measure(self, checkpoint: Path) -> None:
        folder = self._root / checkpoint.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RESULT).unlink(missing_ok=True)
            with ServerProcess(self._command(checkpoint, folder), _log(folder), grace_s=GRACE_S) as process:
                while process.exit_code() is None and not self._cancelled.is_set():
                    self._cancelled.wait(POLL_S)
        except (OSError, LaunchError) as error:
            self._say(f"warning: {checkpoint.name} is not measured: {error}")
            return
        if not self._cancelled.is_set():
            self._say(_outcome(folder))

    def _command(self, checkpoint: Path, folder: Path) -> LaunchCommand:
        from nemo_automodel.components.speculative.bench.checkpoint_job import CheckpointJob

        job = folder / "job.json"
        spec = replace(self._spec, checkpoint=str(checkpoint))
        CheckpointJob(spec, str(self._base_dir), str(folder)).save(job)
        root = str(Path(nemo_automodel.__file__).parent.parent)
        env = {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        if spec.benchmark.gpu_sets:
            env[VISIBLE] = spec.benchmark.gpu_sets[0]  # for the reference decoder, too
        return LaunchCommand((sys.executable, "-m", JOB_MODULE, str(job)), env, ALWAYS_UNSET)


def _log(folder: Path) -> LogFile:
    return LogFile(folder / "benchmark.log")


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("_")[2]
    return int(number) if number.isdigit() else -1


def _outcome(folder: Path) -> str:
    try:
        result = read_json(folder / RESULT)
    except (OSError, ValueError):
        return f"warning: {folder.name} is not measured: its benchmark died, see {_log(folder)}"
    bench = result.get("benchmark")
    if result["status"] != "ok" or not bench:
        return f"warning: {folder.name} is not measured: {result['reason']} (see {_log(folder)})"
    speedup = "" if bench["speedup"] is None else f", {bench['speedup']:.2f}x"
    length, rate = bench["acceptance_length"], bench["tokens_per_s"]
    return f"{folder.name} as served: acceptance length {length:.3f}, {rate:.1f} tokens/s{speedup}"


def check_gpus_apart(spec: ServeSpec, training_processes: int, environ: Mapping[str, str]) -> None:
    """The benchmark may not take a GPU that trains. Where nvidia-smi knows of none, both share the CPUs.

    Raises:
        ConfigError: no GPU is named for it, or one of those that training takes.
    """
    count = visible_gpus()
    if not count:
        return
    masked = environ.get(VISIBLE)
    devices = [name.strip() for name in masked.split(",")] if masked else [str(index) for index in range(count)]
    training, free = devices[:training_processes], devices[training_processes:]
    named = spec.benchmark.gpu_sets[0].split(",") if spec.benchmark.gpu_sets else []
    if named and not set(named) & set(training):
        return
    take = ",".join(free[: spec.tensor_parallel_size])
    remedy = f"""add 'serve.benchmark.gpu_sets=["{take}"]'""" if free else "fewer train.nproc_per_node, or false"
    found = "names no GPU for itself" if not named else f"would take GPU {','.join(named)}"
    raise ConfigError(
        f"the benchmark beside training {found}; training takes {','.join(training)}", where=WHERE, remedy=remedy
    )
