"""The ring: values, order of sums, messages, no deadlock; and the engine on it, in both worlds."""

import itertools
from collections import Counter

import pytest
import torch

from zerolab import comm
from zerolab.comm import ring, star
from zerolab.errors import DeadlockError, MismatchError, UsageError
from zerolab.lab import evidence, plug, quiz_bank, training, workspace
from zerolab.records import Records
from zerolab.sim import estimate, links, traffic

WORLD_SIZES = (1, 2, 3, 4, 5)
NUMELS = (1, 4, 7, 60)


def inputs(world_size, numel, dtype=torch.float32):
    """One tensor a rank, all different."""
    luck = torch.Generator().manual_seed(world_size + numel)
    if not dtype.is_floating_point:
        return list(torch.randint(-99, 99, (world_size, numel), generator=luck, dtype=dtype))
    return list(torch.randn(world_size, numel, generator=luck).to(dtype))


def in_rank_order(tensors):
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def on_ranks(function, world_size, *args, world="lockstep"):
    return comm.run(function, world_size, world, args=args, ledger=False)


# ---------------------------------------------------------------- values


def all_reduced(given):
    tensor = given[comm.get_rank()].clone()
    ring.all_reduce(tensor)
    return tensor


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("numel", NUMELS)
def test_all_reduce_matches_the_sum_in_rank_order_within_rounding(world_size, numel):
    given = inputs(world_size, numel)
    results = on_ranks(all_reduced, world_size, given)
    for result in results:
        assert torch.equal(result, results[0])
        torch.testing.assert_close(result, in_rank_order(given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numel", NUMELS)
def test_two_ranks_and_whole_numbers_are_exact(numel):
    given = inputs(2, numel)
    assert torch.equal(on_ranks(all_reduced, 2, given)[0], in_rank_order(given))
    for world_size in WORLD_SIZES:
        given = inputs(world_size, numel, torch.int64)
        assert torch.equal(on_ranks(all_reduced, world_size, given)[0], in_rank_order(given))


def test_sums_are_in_ring_order_so_only_the_last_slice_is_exact_beyond_two_ranks():
    given = inputs(4, 4000)
    same = on_ranks(all_reduced, 4, given)[0] == in_rank_order(given)
    assert same[3000:].all() and not same[:3000].all()


def test_sixteen_bits_are_rounded_on_the_way():
    given = inputs(4, 400, torch.bfloat16)
    result = on_ranks(all_reduced, 4, given)[0]
    exact = in_rank_order([tensor.float() for tensor in given])
    assert not torch.equal(result, exact.bfloat16())
    torch.testing.assert_close(result.float(), exact, rtol=2**-6, atol=2**-5)


def scattered(given, in_place):
    rank, tensor = comm.get_rank(), given[comm.get_rank()].clone()
    numel = tensor.numel() // comm.get_world_size()
    own = slice(rank * numel, (rank + 1) * numel)
    output = tensor[own] if in_place else torch.empty(numel, dtype=tensor.dtype)
    before = tensor.clone()
    ring.reduce_scatter(output, tensor)
    if in_place:
        before[own] = tensor[own]
    return output, torch.equal(before, tensor)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter_is_a_slice_of_the_sum_and_leaves_its_input(world_size, in_place):
    given = inputs(world_size, 3 * world_size, torch.int64)
    results = on_ranks(scattered, world_size, given, in_place)
    assert torch.equal(torch.cat([output for output, _ in results]), in_rank_order(given))
    assert all(kept for _, kept in results)


def gathered(given, in_place):
    rank, shard = comm.get_rank(), given[comm.get_rank()].clone()
    output = torch.full((shard.numel() * comm.get_world_size(),), -1.0)
    if in_place:
        shard = output[rank * shard.numel() : (rank + 1) * shard.numel()].copy_(shard)
    ring.all_gather(output, shard)
    return output


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather_lays_slices_end_to_end(world_size, in_place):
    given = inputs(world_size, 3)
    for result in on_ranks(gathered, world_size, given, in_place):
        assert torch.equal(result, torch.cat(given))


def summed_by(given, name):
    tensor = given[comm.get_rank()].clone()
    getattr(star, name)(tensor)
    return tensor


@pytest.mark.parametrize("world_size", [*WORLD_SIZES, 7, 8])
def test_star_and_tree_are_a_second_opinion(world_size):
    given = inputs(world_size, 6, torch.int64)
    expected = in_rank_order(given)
    given = [tensor.view(2, 3) for tensor in given]
    for name in ("sum_everywhere", "tree_sum"):
        for result in on_ranks(summed_by, world_size, given, name):
            assert torch.equal(result.view(-1), expected)


def test_the_example_of_the_docstring():
    assert [ring.sent_slice(0, 4, step) for step in range(3)] == [3, 2, 1]


# ---------------------------------------------------------------- messages


def sent_in(function, numel):
    tensor = torch.zeros(numel)
    function(tensor)
    return comm.records().collectives


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("numel", [12, 10])
def test_a_ring_sends_what_the_formula_says_to_the_right_neighbour(world_size, numel):
    for rank, events in enumerate(on_ranks(sent_in, world_size, ring.all_reduce, numel)):
        sent = [event for event in events if event.op == "send"]
        assert {event.peer for event in sent} <= {(rank + 1) % world_size}
        assert len(sent) == len(events) - len(sent) == 2 * (world_size - 1)
        elements = sum(event.elements for event in sent)
        assert elements == links.ring_sent_elements(numel, world_size)
        padded = -(-numel // world_size) * world_size
        assert 4 * elements == traffic.sent_bytes(2 * padded, world_size, "fp32")


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8])
def test_star_and_tree_send_whole_tensors(world_size):
    events = on_ranks(sent_in, world_size, star.sum_everywhere, 5)
    sent = [sum(e.elements for e in rank if e.op == "send") for rank in events]
    assert sent == [links.star_sent_elements(5, world_size)] + [5] * (world_size - 1)
    events = on_ranks(sent_in, world_size, star.tree_sum, 5)
    sizes = Counter(e.elements for rank in events for e in rank if e.op == "send")
    assert sizes == {5: 2 * (world_size - 1)}


def blocking_exchange(outgoing, incoming):
    rank, world_size = comm.get_rank(), comm.get_world_size()
    comm.send(outgoing, (rank + 1) % world_size)
    comm.recv(incoming, (rank - 1) % world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_everybody_sending_first_is_a_deadlock_and_the_table_shows_every_rank(world_size):
    naive = plug.plugged("zerolab.comm.ring:exchange", blocking_exchange)
    with naive, pytest.raises(DeadlockError) as caught:
        on_ranks(all_reduced, world_size, inputs(world_size, 4))
    assert [row.op for row in caught.value.table] == ["send"] * world_size
    assert all("comm.send(outgoing" in row.source for row in caught.value.table)


def question_of_chapter_2(name):
    bank = quiz_bank.read_bank(workspace.course_folder() / "quiz/02.toml")
    return next(question for question in bank.questions if question.id == name)


def test_the_bug_of_the_quiz_gives_right_sums_and_sends_whole_tensors_at_the_named_line():
    question = question_of_chapter_2("02-ring-bug")
    lines = question.code.splitlines()
    (right,) = question.right
    assert "passing = tensor.clone()" in lines[question.choices[right].line - 1]
    names = {"comm": comm, "torch": torch, "exchange": ring.exchange}
    exec(question.code, names)
    given = inputs(4, 8, torch.int64)

    def rank():
        tensor = given[comm.get_rank()].clone()
        names["ring_all_reduce"](tensor)
        events = comm.records().collectives
        return tensor, sum(e.elements for e in events if e.op == "send")

    for tensor, sent in on_ranks(rank, 4):
        assert torch.equal(tensor, in_rank_order(given))
        assert sent == 4 / 2 * links.ring_sent_elements(8, 4)


# ---------------------------------------------------------------- the switch


def every_collective(numel=12):
    rank, world_size = comm.get_rank(), comm.get_world_size()
    full = torch.arange(float(numel)) * (rank + 1)
    shard = torch.empty(numel // world_size)
    comm.reduce_scatter(shard, full, "avg", label="grads")
    out = torch.empty(numel)
    comm.all_gather(out, shard, purpose="control")
    comm.all_reduce(full)
    return out, full, comm.records()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_composed_call_is_one_event_and_its_messages_are_parts(world_size):
    plain = comm.run(every_collective, world_size, "lockstep")
    with comm.use_ring():
        composed = comm.run(every_collective, world_size, "lockstep")
    for (out, full, records), (out_, full_, records_) in zip(plain, composed, strict=True):
        torch.testing.assert_close(out_, out)
        torch.testing.assert_close(full_, full)
        facts = [(e.seq, e.op, e.elements, e.purpose, e.label) for e in records.collectives]
        assert facts == [
            (e.seq, e.op, e.elements, e.purpose, e.label) for e in records_.collectives
        ]
        assert not records.parts and len(records_.parts) == 8 * (world_size - 1)
        sent = sum(e.elements for e in records_.parts if e.op == "send")
        assert sent == 4 * (world_size - 1) * 12 // world_size
        purposes = [e.purpose for e in records_.parts]
        assert purposes.count("control") == 2 * (world_size - 1)
        assert Records.from_json(records_.to_json()).parts == records_.parts


def test_the_switch_holds_for_the_block_only():
    assert not comm.run(every_collective, 2)[0][2].parts
    with comm.use_ring(), comm.use_ring():
        assert comm.run(every_collective, 2)[0][2].parts
    assert not comm.run(every_collective, 2)[0][2].parts


def with_the_switch_inside():
    with comm.use_ring():
        inside = len(every_collective()[2].parts)
    return inside, len(every_collective()[2].parts)


def test_a_rank_may_turn_the_switch_itself():
    assert comm.run(with_the_switch_inside, 2) == [(8, 8)] * 2


def largest():
    value = torch.tensor([float(comm.get_rank())])
    with comm.use_ring():
        comm.all_reduce(value, "max")
    return value.item(), len(comm.records().parts)


def test_a_maximum_stays_the_worlds_own():
    assert comm.run(largest, 3) == [(2.0, 0)] * 3


def in_any_order():
    rank, world_size = comm.get_rank(), comm.get_world_size()
    first, second = torch.ones(4), torch.full((4,), 2.0)
    works = [comm.all_reduce(first, async_op=True), comm.all_reduce(second, async_op=True)]
    poisoned = bool(first.isnan().all() and second.isnan().all())
    sent_early = len(comm.records().parts)
    if rank % 2:
        works.reverse()
    for work in works:
        work.wait()
        work.wait()
    third = torch.full((2,), float(rank))
    late = comm.all_reduce(third, async_op=True)
    comm.barrier()  # another call: what was launched before it is finished first
    sent = comm.send(torch.ones(1), (rank + 1) % world_size, async_op=True)
    comm.recv(torch.empty(1), (rank - 1) % world_size)
    sent.wait()
    late.wait()
    return poisoned, sent_early, first[0].item(), second[0].item(), third[0].item()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_launching_sends_nothing_and_works_may_be_waited_for_in_any_order(world_size):
    with comm.use_ring():
        results = comm.run(in_any_order, world_size, "lockstep")
    total = world_size * (world_size - 1) / 2
    assert results == [(True, 0, world_size, 2.0 * world_size, total)] * world_size


def different_calls():
    tensor = torch.zeros(4)
    if comm.get_rank():
        comm.all_reduce(tensor)
    else:
        comm.all_gather(tensor, torch.zeros(2))


@pytest.mark.parametrize("world", ["lockstep", "gloo"])
def test_different_calls_on_the_ring_are_told_apart(world):
    with comm.use_ring(), pytest.raises(MismatchError) as caught:
        comm.run(different_calls, 2, world, timeout=20)
    assert "of all_gather #0" in str(caught.value) and "of all_reduce #0" in str(caught.value)


def ring_against_barrier():
    if comm.get_rank():
        comm.barrier()
    else:
        comm.all_reduce(torch.zeros(4))


@pytest.mark.parametrize("world", ["lockstep", "gloo"])
def test_a_ring_against_another_call_ends_in_a_table(world):
    with comm.use_ring(), pytest.raises(DeadlockError):
        comm.run(ring_against_barrier, 2, world, timeout=20)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gloo_ranks_give_the_bits_of_lockstep_ranks(world_size):
    with comm.use_ring():
        threads = comm.run(every_collective, world_size, "lockstep")
        processes = comm.run(every_collective, world_size, "gloo", timeout=60)
    for (out, full, records), (out_, full_, records_) in zip(threads, processes, strict=True):
        assert torch.equal(out, out_) and torch.equal(full, full_)
        assert [e.elements for e in records.parts] == [e.elements for e in records_.parts]


# ---------------------------------------------------------------- the engine on the ring


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stages_train_on_the_ring(stage, world_size):
    plain = evidence.train_tiny(stage, world_size)
    with comm.use_ring():
        composed = evidence.train_tiny(stage, world_size)
    for before, after in zip(plain, composed, strict=True):
        assert after.moved == before.moved and after.optimizer_bytes == before.optimizer_bytes
        if world_size < 3:
            assert torch.equal(after.weights, before.weights)
        torch.testing.assert_close(after.weights, before.weights, rtol=1e-5, atol=1e-6)


def test_stage_3_trains_on_the_ring():
    plain = training.train(stage=3, steps=1, model="gpt-nano", dtype="fp32")
    with comm.use_ring():
        composed = training.train(stage=3, steps=1, model="gpt-nano", dtype="fp32")
    assert composed.losses == pytest.approx(plain.losses, rel=1e-5)
    moved = [run.fullest.elements_moved for run in (plain, composed)]
    assert moved[0] == moved[1] and composed.fullest.records.parts


def test_what_is_plugged_in_carries_the_engine():
    rounds = []

    def counting(rank, world_size, step):
        rounds.append(step)
        return (rank - 1 - step) % world_size

    with plug.plugged("zerolab.comm.ring:sent_slice", counting), comm.use_ring():
        evidence.train_tiny(2, 2)
    assert rounds


# ---------------------------------------------------------------- the cost model


def replayed(numel, world_size, latency, bandwidth):
    """Add the messages of one rank up, as they were sent."""
    events = on_ranks(sent_in, world_size, ring.all_reduce, numel)[0]
    return sum(latency + e.nbytes / bandwidth for e in events if e.op == "send")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ring_seconds_are_those_of_its_messages(world_size):
    expected = replayed(12, world_size, 3.0, 5.0)
    assert links.ring_seconds(48, world_size, 3.0, 5.0) == pytest.approx(expected)
    assert estimate.ring_seconds is links.ring_seconds


def test_the_ring_wins_above_the_crossover_and_the_tree_below():
    for world_size, latency in itertools.product((4, 5, 8, 64), (1e-6, 1e-3)):
        link = (world_size, latency, 1e9)
        size = links.crossover_bytes(*link)
        assert links.ring_seconds(size, *link) == pytest.approx(links.tree_seconds(size, *link))
        assert links.ring_seconds(2 * size, *link) < links.tree_seconds(2 * size, *link)
        assert links.ring_seconds(size / 2, *link) > links.tree_seconds(size / 2, *link)
    assert links.crossover_bytes(2, 1.0, 1.0) == 0 and links.tree_depth(9) == 4
    assert links.star_seconds(10, 4, 1.0, 1.0) == 6 * 11


def test_latency_and_bandwidth_are_read_off_two_measurements():
    assert links.fitted((10, 3.0), (110, 5.0)) == pytest.approx((2.8, 50.0))
    with pytest.raises(UsageError, match="larger message must be the slower one"):
        links.fitted((10, 3.0), (110, 3.0))
    with pytest.raises(UsageError, match="below 1"):
        links.tree_depth(0)
