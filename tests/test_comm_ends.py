"""When a collective ended, and how long it kept its rank from anything else."""

import time

import pytest
import torch

from zerolab import comm
from zerolab.records import Records


def a_rank():
    """One call that is waited for late, one that is waited for at once, one that nobody awaits."""
    tensor = torch.ones(64)
    work = comm.all_reduce(tensor, async_op=True)
    time.sleep(0.05)
    work.wait()
    work.wait()
    comm.barrier()
    lost = comm.all_reduce(torch.ones(64), async_op=True)
    assert lost is not None
    comm.barrier()
    return comm.records()


@pytest.mark.parametrize("world", ["lockstep", "gloo"])
def test_ends_are_recorded_when_wait_returns(world):
    for records in comm.run(a_rank, 2, world=world):
        late, at_once, lost, _ = records.collectives
        assert late.ended - late.time >= 0.05 and at_once.ended > at_once.time
        assert late.blocked < late.ended - late.time
        assert lost.ended == 0.0 and lost.blocked == 0.0
        assert records.world == world


def test_the_time_of_other_ranks_is_not_blocked_time_in_lockstep():
    def rank():
        if comm.get_rank() == 1:
            time.sleep(0.4)
        comm.barrier()
        return comm.records().collectives[0]

    first, second = comm.run(rank, 2)
    assert first.ended - first.time >= 0.4 > 0.2 > first.blocked
    assert second.blocked < 0.2


def test_a_late_peer_is_blocked_time_among_processes():
    def rank():
        comm.barrier()
        if comm.get_rank() == 1:
            time.sleep(0.6)
        comm.barrier()
        return comm.records().collectives[1]

    first, _ = comm.run(rank, 2, world="gloo")
    assert first.blocked >= 0.3  # less than the peer slept: this rank may begin to wait later


def test_ends_and_world_travel_through_json():
    records = comm.run(a_rank, 2)[0]
    again = Records.from_json(records.to_json())
    assert again.collectives == records.collectives and again.world == "lockstep"


def test_alone_there_is_an_end_too():
    before = len(comm.records().collectives)
    comm.all_reduce(torch.ones(3))
    event = comm.records().collectives[before]
    assert event.ended >= event.time and comm.records().world == "solo"
