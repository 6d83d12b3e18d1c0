# SPDX-License-Identifier: Apache-2.0
"""What torchrun's and Slurm's variables mean."""

from __future__ import annotations

import pytest

from nemo_automodel.components.speculative.train.placement import first_host, outer_placement, without_placement
from nemo_automodel.errors import ConfigError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu7", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1234567", "SLURM_NNODES": "2",
         "SLURM_JOB_NODELIST": "gpu[003-004]"}  # fmt: skip


def test_torchrun():
    place = outer_placement(TORCHRUN)
    assert (place.rank, place.world_size, place.local_rank, place.launcher) == (3, 4, 1, "torchrun")
    assert TORCHRUN == place.environment()


def test_one_process_alone_is_no_group():
    assert outer_placement({}) is None
    assert outer_placement({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None
    assert outer_placement({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert outer_placement({"SLURM_NTASKS": "8"}) is None  # salloc's shell


def test_slurm_tasks_agree_on_an_address():
    place = outer_placement(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.master_addr) == (5, 8, 1, "gpu003")
    assert place.master_port == outer_placement({**SLURM, "SLURM_PROCID": "0"}).master_port
    assert outer_placement({**SLURM, "SLURM_NNODES": "1"}).master_addr == "127.0.0.1"
    assert outer_placement({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "7"}).environment()["MASTER_PORT"] == "7"


def test_the_step_of_srun_goes_before_the_job():
    assert outer_placement({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert outer_placement({**SLURM, "SLURM_STEP_NUM_TASKS": "6"}).world_size == 6


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n1,n2", "n1"), ("gpu[003-006,9],x1", "gpu003"), ("a-[7,8]-ib,b", "a-7-ib")]
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_what_makes_no_sense_is_named():
    with pytest.raises(ConfigError, match="no number"):
        outer_placement({**TORCHRUN, "RANK": "one"})
    with pytest.raises(ConfigError, match="rank 4 of 4"):
        outer_placement({**TORCHRUN, "RANK": "4"})


def test_a_process_that_stands_alone_inherits_nothing():
    env = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "x", "PATH": "/bin"}
    assert without_placement(env) == {"PATH": "/bin"}
