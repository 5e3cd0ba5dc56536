"""collective_steps: the rounds of the ring, those of a run's messages, and its script."""

import json

import pytest
import torch

from zerolab import comm
from zerolab.comm import ring as ring_of_comm
from zerolab.errors import UsageError
from zerolab.records import Records
from zerolab_widgets import CollectiveSteps, messages, rounds
from zerolab_widgets.rounds import Message

N = 4


def run(program, world_size=N):
    """The records of a lockstep run of a program."""

    def rank():
        program()
        return comm.records()

    return comm.run(rank, world_size, "lockstep")


def scattered():
    output, tensor = torch.zeros(3), torch.arange(3.0 * comm.get_world_size())
    ring_of_comm.reduce_scatter(output, tensor)


def gathered():
    ring_of_comm.all_gather(torch.zeros(3 * comm.get_world_size()), torch.ones(3))


def star():
    """Everybody sends the whole tensor to rank 0, which sends the sum back."""
    tensor, arriving = torch.ones(12), torch.zeros(12)
    others = range(1, comm.get_world_size())
    if comm.get_rank():
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    for rank in others:
        comm.recv(arriving, rank)
        tensor += arriving
    for rank in others:
        comm.send(tensor, rank)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("algorithm", rounds.ALGORITHMS)
def test_the_ring_ends_with_every_goal_whole(algorithm, world_size):
    begin = rounds.start(world_size, world_size, algorithm)
    steps = rounds.ring(world_size, algorithm)
    assert len(steps) == (world_size - 1) * (2 if algorithm == "all_reduce" else 1)
    end = rounds.history(begin, steps)[-1]
    for rank, chunk in rounds.goals(world_size, world_size, algorithm):
        assert end[rank][chunk] == rounds.whole(world_size, chunk, algorithm)


def test_every_rank_sends_one_chunk_to_the_next_in_every_round():
    for sent in rounds.ring(N, "all_reduce"):
        assert [(m.src, m.dst) for m in sent] == [(0, 1), (1, 2), (2, 3), (3, 0)]
        assert len({m.chunk for m in sent}) == N
    assert [m.chunk for m in rounds.ring(N, "reduce_scatter")[0]] == [3, 0, 1, 2]
    assert rounds.sent(rounds.ring(N, "all_reduce")) == dict.fromkeys(range(N), 2 * (N - 1))


@pytest.mark.parametrize(
    ("program", "algorithm"),
    [(scattered, "reduce_scatter"), (gathered, "all_gather")],
)
def test_messages_of_the_ring_of_comm_are_the_textbooks(program, algorithm):
    reading = messages.rounds_of(run(program), algorithm)
    assert (reading.chunks, reading.elements) == (N, 12)
    wanted = rounds.ring(N, algorithm)
    assert len(reading.rounds) == len(wanted)
    for sent, textbook in zip(reading.rounds, wanted, strict=True):
        assert {(m.src, m.dst, m.chunk, m.adds) for m in sent} == {
            (m.src, m.dst, m.chunk, m.adds) for m in textbook
        }


def test_an_all_reduce_of_the_ring_of_comm_ends_whole_everywhere():
    ranks = run(lambda: ring_of_comm.all_reduce(torch.ones(10)))
    steps = CollectiveSteps.of(ranks)
    assert len(steps.steps) == 2 * (N - 1)
    assert "every rank sends 1.5 times the tensor" in steps.finding
    assert steps.finding.endswith("At the end every rank has all of it.")


def test_a_collective_that_went_round_the_ring_is_drawn_by_its_parts():
    def composed():
        with comm.use_ring():
            comm.reduce_scatter(torch.zeros(3), torch.ones(12))

    steps = CollectiveSteps.of(run(composed), "reduce_scatter")
    assert steps.steps == CollectiveSteps(N, "reduce_scatter").steps


def test_two_ranks_send_as_much_as_the_tensor():
    assert "every rank sends as much as the tensor." in CollectiveSteps(2).finding


def test_a_star_takes_longer_and_its_centre_sends_most():
    reading = messages.rounds_of(run(star))
    assert (reading.chunks, reading.elements) == (1, 12)
    assert reading.rounds[0] == (Message(1, 0, 0, 12, True),)
    assert len(reading.rounds) == 2 * (N - 1)
    finding = CollectiveSteps.of(run(star)).finding
    assert "rank 0 sends most, 3 times the tensor" in finding and "has all of it" in finding


def test_a_ring_that_stops_early_lacks_somebodys_numbers():
    def early():
        chunk, arriving = torch.ones(3), torch.zeros(3)
        for _ in range(comm.get_world_size() - 2):
            ring_of_comm.exchange(chunk, arriving)
            chunk = arriving + 1

    finding = CollectiveSteps.of(run(early), "reduce_scatter").finding
    assert "At the end rank 0 lacks the numbers of rank 1 in chunk 0." in finding


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(UsageError, match="all_to_all"):
        CollectiveSteps(4, "all_to_all")
    with pytest.raises(UsageError, match="world_size=9"):
        CollectiveSteps(9)
    with pytest.raises(UsageError, match="no message between two ranks"):
        CollectiveSteps.of(run(lambda: comm.all_reduce(torch.ones(4))))
    with pytest.raises(UsageError, match="those of all ranks"):
        CollectiveSteps.of([Records(rank=1), Records(rank=2)])


def test_steps_say_what_travels():
    steps = CollectiveSteps(4, "reduce_scatter")
    assert steps.steps[1]["says"] == (
        "Step 2 of 3: rank 0 sends chunk 2 (sum of ranks 0 and 3) to rank 1, which adds it; "
        "4 ranks send at once."
    )
    assert "which keeps it" in CollectiveSteps(4, "all_gather").steps[0]["says"]
    assert steps.finding == (
        "Ring reduce-scatter on 4 ranks: 3 steps, every rank sends 0.75 times the tensor. "
        "At the end each rank has one chunk of the sum, whole."
    )


def test_state_stays_small_and_the_still_picture_is_the_same_twice():
    steps = CollectiveSteps(8, "all_reduce")
    assert len(json.dumps(steps.get_state(), default=str)) < 50_000
    first, second = CollectiveSteps(4), CollectiveSteps(4)
    data, _ = first._repr_mimebundle_()
    assert data["text/html"] == second.to_html() and "0+1+2+3, whole" in data["text/html"]
    assert repr(first) == repr(second) == data["text/plain"]


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_script_steps_by_button_key_and_slider(draw, keep, dark):
    page = draw("collective_steps", CollectiveSteps(4, "all_reduce"), dark=dark)
    assert page.locator("[data-held]").count() == 16
    assert page.locator(".zl-whole").count() == 0
    page.get_by_role("button", name="one step on").click()
    assert page.evaluate("window.model.get('at')") == 1
    assert page.locator("[data-arrow]").count() == 4
    assert page.locator(".zl-said").inner_text().startswith("Step 1 of 6: rank 0 sends chunk 3")
    page.locator("svg").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.locator(".zl-whole").count() == 4
    keep(page, f"collective_steps_{'dark' if dark else 'light'}")
    page.keyboard.press("End")
    assert page.locator(".zl-whole").count() == 16
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("window.model.get('at')") == 5
    page.locator("input[type=range]").fill("0")
    assert page.locator("[data-arrow]").count() == 0


@pytest.mark.browser
def test_script_plays_to_the_end_and_stops(draw):
    page = draw("collective_steps", CollectiveSteps(2, "reduce_scatter"))
    page.locator("svg").focus()
    page.keyboard.press(" ")
    assert page.get_by_role("button", name="pause").count() == 1
    page.wait_for_function("window.model.get('at') === 1")
    page.get_by_role("button", name="play").wait_for()


@pytest.mark.browser
def test_script_draws_a_run_of_many_ranks(draw, keep):
    page = draw("collective_steps", CollectiveSteps.of(run(star)))
    page.get_by_role("button", name="one step on").click()
    assert page.locator("[data-arrow]").count() == 1
    keep(page, "collective_steps_star")
    page = draw("collective_steps", CollectiveSteps(8, "all_gather"))
    page.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    keep(page, "collective_steps_8")
