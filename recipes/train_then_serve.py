# SPDX-License-Identifier: Apache-2.0
"""Train a draft, then serve it: compose -> parse -> preflight -> train -> serve.

python recipes/train_then_serve.py serve.enabled=true
python recipes/train_then_serve.py --help
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

try:
    import hydra

    import nemo_automodel  # noqa: F401
except ModuleNotFoundError as missing:
    sys.exit(f"error: no {missing.name} here [{sys.executable}] -> make setup, then use .venv/bin/python")

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from nemo_automodel.components.speculative.serve.forecast import print_forecast
from nemo_automodel.components.speculative.serve.pipeline import refuse_foreground_sweep, run_serve
from nemo_automodel.components.speculative.serve.preflight import preflight
from nemo_automodel.components.speculative.serve.record import is_recorded, record_failure, record_training
from nemo_automodel.components.speculative.serve.secret_names import refuse_secret_overrides
from nemo_automodel.components.speculative.serve.types import ServeSpec
from nemo_automodel.components.speculative.sweep import (
    SweepCallback,
    prepare_arguments,
    quote_value,
    refuse_unusable_place,
)
from nemo_automodel.components.speculative.train.followers import Followers
from nemo_automodel.components.speculative.train.job import build_train_job
from nemo_automodel.components.speculative.train.outcome import last_checkpoint, target_of_run
from nemo_automodel.components.speculative.train.placement import outer_placement
from nemo_automodel.components.speculative.train.workers import follow_training
from nemo_automodel.config.parse import build_serve_spec, parse_config, with_absolute_paths
from nemo_automodel.config.schema import AppConfig
from nemo_automodel.config.store import register
from nemo_automodel.errors import ConfigError, Interrupted, UserError
from nemo_automodel.files import expand_user


CONF = Path(__file__).resolve().parent.parent / "conf"
followers = Followers(None)  # under torchrun or Slurm: set by `command_line`


@dataclass(frozen=True)
class Place:
    """Where this job runs: Hydra's run dir, the directory the user typed in, and whether it is one of many."""

    run_dir: Path
    base_dir: Path
    recipe: str
    multirun: bool


def run_job(app: AppConfig, place: Place) -> int:
    """Preflight, train, serve; returns the exit code. Training has ended, and freed the GPU, before serving begins."""
    _refuse_nothing_to_do(app)
    checkpoint = _checkpoint_to_serve(app, place)
    spec = build_serve_spec(app, checkpoint=checkpoint, base_dir=place.base_dir)
    if app.serve.enabled:
        refuse_foreground_sweep(spec, place.multirun)
        _refuse_another_target(app, checkpoint, place)
    untrained = app.train.enabled and checkpoint == str(place.run_dir)
    beside = app.train.enabled and app.serve.benchmark.during_training
    if (app.serve.enabled or beside) and untrained:
        asked = spec if app.serve.enabled else replace(spec, port=0)  # benchmarks beside training find one of their own
        asked = replace(asked, benchmark_mode=asked.benchmark_mode or beside)
        preflight(asked, app.draft, app.train, base_dir=place.base_dir)
    if spec.print_only and untrained:
        line = _train_line(place)
        return print_forecast(spec, line, app.draft, base_dir=place.base_dir, run_dir=place.run_dir)
    if app.train.enabled and not spec.print_only:
        spec = replace(spec, checkpoint=str(_train(app, spec, place)))
    if not app.serve.enabled:
        return 0
    followers.dismiss()
    return run_serve(spec, base_dir=place.base_dir, out_dir=place.run_dir, multirun=place.multirun)


def _train(app: AppConfig, spec: ServeSpec, place: Place) -> Path:
    """Train, with benchmarks of the checkpoints beside it where they are asked for; the checkpoint to go on with."""
    job = build_train_job(app, place.run_dir)
    with contextlib.ExitStack() as stack:
        beside = None
        if app.serve.benchmark.during_training:
            from nemo_automodel.components.speculative.bench.beside_training import BesideTraining, check_gpus_apart

            check_gpus_apart(spec, app.train.nproc_per_node, os.environ)
            beside = BesideTraining(spec, run_dir=place.run_dir, base_dir=place.base_dir, say=_say_between)
            stack.enter_context(beside)
        result = followers.train(job, multirun=place.multirun)
        chosen = result.best if app.serve.checkpoint == "BEST" and result.best else result.checkpoint
        record_training(place.run_dir, chosen, status="ok", reason=None)
        if beside is not None:  # a serve stage that measures will do so for the last one
            beside.finish(measure_last=not (app.serve.enabled and spec.benchmark_mode))
    return chosen


def _say_between(text: str) -> None:
    """A line on a terminal that the training worker's bar is drawn on."""
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def _refuse_nothing_to_do(app: AppConfig) -> None:
    if app.serve.enabled or (app.train.enabled and not app.serve.print_only):
        return
    where = "serve.print_only=true serve.enabled=false" if app.serve.print_only else "train.enabled=false"
    raise ConfigError("nothing to do", where=where, remedy="add serve.enabled=true")


def _train_line(place: Place) -> str:
    """The shell command that trains, and only trains, into this run dir; it works from any folder."""
    hydra_config = HydraConfig.get()
    given = [text for text in hydra_config.overrides.task if not text.startswith("serve.")]
    own = [source.path for source in hydra_config.runtime.config_sources if source.provider == "command-line"]
    flags = ["-cn", place.recipe, *(word for path in own for word in ("--config-dir", path))]
    run_dir = f"hydra.run.dir={quote_value(str(place.run_dir))}"
    words = [sys.executable, str(Path(__file__).resolve()), *flags, *given, "serve.enabled=false", run_dir]
    return f"cd {shlex.quote(str(place.base_dir))} && {shlex.join(words)}"


def _checkpoint_to_serve(app: AppConfig, place: Place) -> str:
    """What `serve.checkpoint` means here; LATEST and BEST without training are those of this recipe's newest run."""
    wanted = app.serve.checkpoint
    if app.train.enabled and wanted in ("LATEST", "BEST"):
        return str(place.run_dir)
    if app.train.enabled:
        if not app.serve.print_only:
            raise ConfigError(
                "a run that trains serves its own last checkpoint, or its best",
                where=f"serve.checkpoint={wanted}",
                remedy="add train.enabled=false, or serve.checkpoint=BEST, or leave it out",
            )
    if wanted not in ("LATEST", "BEST"):
        return wanted
    runs = sorted((place.base_dir / "outputs" / place.recipe).glob(f"*/checkpoints/{wanted}"))
    if app.serve.enabled and not runs:
        raise ConfigError(
            f"no finished run under outputs/{place.recipe}/",
            where=f"serve.checkpoint={wanted}",
            remedy="train first, or add serve.checkpoint=PATH",
        )
    return str(runs[-1]) if runs else wanted


def _refuse_another_target(app: AppConfig, checkpoint: str, place: Place) -> None:
    """A draft of ours says in its run which target it was trained for; `serve.target` insists on another."""
    trained_for = target_of_run(place.base_dir / expand_user(checkpoint))
    if app.train.enabled or app.serve.target or trained_for in (None, app.target.path):
        return
    raise ConfigError(
        f"this draft was trained for {trained_for}",
        where=f"target.path={app.target.path}",
        remedy=f"add {shlex.quote(f'target.path={quote_value(str(trained_for))}')}, or serve.target=MODEL to insist",
    )


def guarded(config: DictConfig, place: Place) -> int:
    """Run one job; a user's mistake is one line. In a sweep no failure may end the other jobs."""
    try:
        return run_job(with_absolute_paths(parse_config(config), place.base_dir), place)
    except UserError as error:
        _record(place, error)
        print(f"error: {error}", file=sys.stderr)
        if place.multirun and isinstance(error, Interrupted):
            raise KeyboardInterrupt from error
        return error.exit_code
    except Exception as error:
        _record(place, error)
        if not place.multirun:
            raise
        traceback.print_exc()
        return 1


def _record(place: Place, error: Exception) -> None:
    """Leave the reason in result.json first: the terminal may be gone."""
    saved = last_checkpoint(place.run_dir)
    try:
        if isinstance(error, Interrupted) and saved and not is_recorded(place.run_dir, error):
            record_training(place.run_dir, saved, status="failed", reason=str(error))
        else:
            record_failure(place.run_dir, error)
    except UserError as unwritten:  # a full disk: the error itself must still be told
        print(f"warning: {unwritten}", file=sys.stderr)


@hydra.main(version_base="1.3", config_path="../conf", config_name="quickstart")
def main(config: DictConfig) -> None:
    """One job, as Hydra calls it."""
    hydra_config = HydraConfig.get()
    place = Place(
        run_dir=Path(hydra_config.runtime.output_dir),
        base_dir=Path(hydra_config.runtime.cwd),
        recipe=hydra_config.job.config_name,
        multirun=hydra_config.mode is RunMode.MULTIRUN,
    )
    code = guarded(config, place)
    if code and not place.multirun:
        sys.exit(code)


def command_line() -> int:
    """Compose and run; after a multirun, the leaderboard decides the exit code.

    Of the processes that torchrun or Slurm started only the first does so; the others train what it tells them.
    """
    global followers
    try:
        placement = outer_placement(os.environ)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if placement is not None and placement.rank > 0:
        return follow_training(placement)
    followers = Followers(placement)
    try:
        return _first_process()
    finally:
        followers.dismiss()


def _first_process() -> int:
    register()
    try:
        refuse_secret_overrides(sys.argv[1:])  # Hydra writes the command line into .hydra/ before anybody looks
        sys.argv[1:] = prepare_arguments(sys.argv[1:], Path.cwd())
        refuse_unusable_place(sys.argv[1:], Path.cwd(), CONF)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        main()
    except KeyboardInterrupt:
        return Interrupted.exit_code
    finally:
        failed = _finish_sweep()
    return 1 if failed else 0


def _finish_sweep() -> int:
    """Write and show the leaderboard of the sweep that just ran, if one did; returns the number of failed jobs."""
    if SweepCallback.sweep_dir is None:
        return 0
    from nemo_automodel.components.speculative.bench.leaderboard import write_leaderboard

    return write_leaderboard(SweepCallback.sweep_dir)


if __name__ == "__main__":
    sys.exit(command_line())
