# %% [markdown] title
# # Collectives
#
# **The question.** Every rank has gradients of its own, and in the end all ranks must know the
# sum. How much must one rank send for that, and does it grow with the number of ranks? The last
# measurement of this chapter answers, on functions that you wrote.
#
# *Estimated 110 minutes. You need chapters 00 and 01. You build a ring: reduce-scatter,
# all-gather and all-reduce out of messages between neighbours. The engine then trains on them, in
# this chapter and in the next one.*

# %% question
import torch

import zerolab
from zerolab import comm, gpt, lab
from zerolab.comm import ring, star
from zerolab.sim import links, traffic
from zerolab_widgets import CollectiveSteps, DeadlockTable

lab.begin("02")
ranks = lab.world_size()
run = lab.train(model="gpt-1m", stage=0, steps=1)
calls = [event for event in run.ranks[0].records.collectives if event.purpose == "data"]
psi = gpt.num_params(gpt.preset("gpt-1m"))
print(f"{psi:,} parameters, {ranks} ranks, one step. Each rank calls:")
for event in calls:
    print(f"  {event.op} of {event.elements:,} elements")

# %% [markdown] vocabulary
# ## Five verbs
#
# A *collective* is a call that all ranks make, in the same order. Picture the class again. Every
# pupil has worked through other exercises and holds a page of points, one number for each chapter
# of the book.
#
# | collective | in the class | before | after |
# |---|---|---|---|
# | broadcast | one reads out a page, all copy it | one has it | all have it |
# | all-reduce | all pages are added; everybody has the sum | N pages | the sum, N times |
# | reduce-scatter | added too, each keeps one line of the sum | N pages | the sum, in N slices |
# | all-gather | each reads out a line, all write down all lines | N slices | all slices, N times |
# | all-to-all | each has a letter for each other one | rows | columns |
#
# See four of them happen. Rank 0 begins with ones, rank 1 with tens, rank 2 with hundreds: the
# digits of a sum say who is in it. The ranks are *lockstep* ranks, threads that take turns, so that
# a run is the same every time; processes come at the end of the chapter.


# %% verbs
def on_ranks(function, *args, n=ranks):
    return zerolab.run(function, n, "lockstep", args=args)


def verbs():
    rank, n = comm.get_rank(), comm.get_world_size()
    page = torch.full((n,), 10.0**rank)
    read_out, total = page.clone(), page.clone()
    line, lines = torch.zeros(1), torch.zeros(n)
    comm.broadcast(read_out, src=1)
    comm.all_reduce(total)
    comm.reduce_scatter(line, page)
    comm.all_gather(lines, page[:1].clone())
    return {"broadcast": read_out, "all_reduce": total, "reduce_scatter": line, "all_gather": lines}


for rank, has in enumerate(on_ranks(verbs)):
    words = [f"{verb} {[int(x) for x in tensor]}" for verb, tensor in has.items()]
    print(f"rank {rank}: {', '.join(words)}")

# %% [markdown] sum-of-two
# ## One of them is two others
#
# Look at the third and the fourth column of the table: what reduce-scatter leaves is what
# all-gather begins with. So *an all-reduce is a reduce-scatter followed by an all-gather*. This
# one sentence carries the course: ZeRO does its work between the two halves.


# %% two-halves
def both_ways():
    luck = torch.Generator().manual_seed(comm.get_rank())
    page = torch.randn(3 * comm.get_world_size(), generator=luck)
    at_once, halves, line = page.clone(), torch.zeros_like(page), torch.zeros(3)
    comm.all_reduce(at_once)
    comm.reduce_scatter(line, page)
    comm.all_gather(halves, line)
    return torch.equal(at_once, halves)


print("the same, bit for bit, on every rank:", on_ranks(both_ways))

# %% [markdown] all-to-all
# All-to-all is the one that only moves: a table of letters is transposed. Write it as messages
# and a reduce-scatter falls out of it, because adding up what arrived is all that is missing.
# This is how `comm.reduce_scatter` works on CPUs here.


# %% letters
def letters():
    rank, n = comm.get_rank(), comm.get_world_size()
    page = torch.full((n,), 10.0**rank)  # page[i] goes to rank i
    arrived = torch.zeros(n)
    arrived[rank] = page[rank]
    for distance in range(1, n):
        right, left = (rank + distance) % n, (rank - distance) % n
        sending = comm.send(page[right : right + 1], right, async_op=True)
        comm.recv(arrived[left : left + 1], left)
        sending.wait()
    return arrived


for rank, arrived in enumerate(on_ranks(letters)):
    print(f"rank {rank} got {arrived.int().tolist()}, which is {int(arrived.sum())} in all")

# %% [markdown] blank
# ## A blank: everybody learns the sum
#
# Now without help. **Behaviour:** after `sum_everywhere(tensor)` the tensor of every rank holds
# the sum over all ranks, in place, whatever its shape. **Budget:** at most two more tensors of
# that size on a rank, however many ranks there are. **Allowed:** `comm.send(tensor, dst)` and
# `comm.recv(tensor, src)`, nothing else. `send` returns when the other has received.
#
# Any way that fits will do. Do not look for the best one yet. *About 12 minutes;*
# `lab.hint("2.1")` helps.

# %% exercise zerolab.comm.star:sum_everywhere
lab.check("2.1", sum_everywhere)

# %% [markdown] data-parallel
# ## It carries data parallelism
#
# That is all that data parallelism needs. Each rank computes gradients on its own batch, the
# gradients are added up and divided by N, and every rank takes the same step.

# %% two-layers
from torch import nn
from torch.nn import functional as F


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(rank, step):
    luck = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, 8, generator=luck)
    return inputs, inputs.sum(1, keepdim=True).sin()


def data_parallel(add_up, steps=5):
    model, rank, n = two_layers(), comm.get_rank(), comm.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        inputs, targets = batch(rank, step)
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            add_up(param.grad)
            param.grad /= n
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    return losses, weights, comm.records()


def alone(n, steps=5):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        losses = [F.mse_loss(model(x), y) for x, y in (batch(rank, step) for rank in range(n))]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


# %% who-sends
def with_the_star(gradient):
    star.sum_everywhere(gradient)


shown = on_ranks(data_parallel, with_the_star)
apart = max((weights - alone(ranks)).abs().max().item() for _, weights, _ in shown)
print(f"after 5 steps the weights differ from one process by at most {apart:.1g}")
for rank, (_, weights, records) in enumerate(shown):
    sent = [event.elements for event in records.collectives if event.op == "send"]
    print(f"rank {rank} sent {sum(sent) / weights.numel() / 5:.0f} times its gradients a step")

# %% [markdown] star
# Right, and lopsided if you took the short way: one rank works for all. In the class it is the
# one pupil who collects all pages, adds, and tells each one the result, while the others wait.
# Distributed systems call it a *parameter server*, and its line is the bottleneck. Commit to a
# number: put it in the place of `None` and run.

# %% predict-star
lab.predict("2.8", None)

# %% [markdown] shapes
# ## Three shapes
#
# A *star* sends whole tensors through one rank. A *tree* adds in pairs, then pairs of pairs, and
# sends the sum back down. A *ring* cuts the tensor into N slices and keeps all links busy:
# everybody sends to the right and receives from the left. Counted on the messages of real runs;
# the first column is your `sum_everywhere`, tree and ring are the reference's so far:


# %% three-shapes
def messages_of(module, name, numel):
    getattr(module, name)(torch.ones(numel))
    return [event for event in comm.records().collectives if event.op == "send"]


print("sent by the busiest rank, in tensors (and the number of its sends):")
for n in (2, 4, 8, 16):
    row = []
    for module, name in ((star, "sum_everywhere"), (star, "tree_sum"), (ring, "all_reduce")):
        sends = max(on_ranks(messages_of, module, name, 16 * n, n=n), key=len)
        tensors = sum(event.elements for event in sends) / (16 * n)
        row.append(f"{tensors:6.2f} ({len(sends):2})")
    print(f"{n:2} ranks:  yours {row[0]}   tree {row[1]}   ring {row[2]}")

# %% [markdown] read-shapes
# A star grows with N, a tree with its logarithm. The ring stays below two, whatever N is. It
# pays with more messages, each of them small; what that costs comes at the end. No all-reduce can
# send less than 2 (N-1)/N from its busiest rank (Patarasuk and Yuan, *Bandwidth Optimal
# All-reduce Algorithms for Clusters of Workstations*, 2009), so this is the best there is in
# bytes.
#
# Play it, step by step. The picture calls a slice a chunk.

# %% ring-picture
CollectiveSteps(world_size=ranks, algorithm="reduce_scatter")

# %% [markdown] everybody-first
# ## Everybody sends first
#
# Each round of the ring is the same move: send to the right, receive from the left. The obvious
# two lines are a trap. Run them and read the table.


# %% naive
from zerolab.errors import DeadlockError


def naive_exchange(outgoing, incoming):
    rank, n = comm.get_rank(), comm.get_world_size()
    comm.send(outgoing, (rank + 1) % n)
    comm.recv(incoming, (rank - 1) % n)


def stuck(function):
    try:
        on_ranks(function)
    except DeadlockError as error:
        return DeadlockTable(error)


stuck(lambda: naive_exchange(torch.ones(3), torch.zeros(3)))

# %% [markdown] circle
# Every rank waits in `send` for a neighbour that waits in `send`. A circle of waiting ranks is a
# *deadlock*, and it is worth learning to read one: who waits, in which call, at which line, for
# whom. On a real cluster you would see nothing but silence, for ten or thirty minutes, until a
# timeout.
#
# The trap has a nasty side. Many libraries copy small messages into a buffer and return from
# `send` at once. So the two lines pass every test on small tensors and hang on the first large
# one. The ranks of this notebook never buffer a blocking `send`, so that the mistake shows.

# %% [markdown] your-exchange
# ## Your turn: one round
#
# Write the exchange so that it always ends. There are two classical ways. Let one of the calls
# begin without waiting: `work = comm.send(..., async_op=True)`, and `work.wait()` before you
# return, for until then the message may still be under way. Or let even ranks send first and odd
# ranks receive first. Why does the second way work for an odd number of ranks too? *About 8
# minutes.*

# %% exercise zerolab.comm.ring:exchange
lab.check("2.2", exchange)

# %% [markdown] your-slice
# ## Your turn: which slice is it?
#
# In the reduce-scatter a partial sum walks round the ring. In each round a rank sends on the sum
# that it has just received, its own slice added. In the end rank r is to hold slice r. On 4
# ranks:
#
# | round | rank 0 sends | rank 1 sends | rank 2 sends | rank 3 sends |
# |---|---|---|---|---|
# | 0 | slice 3 | slice 0 | slice 1 | slice 2 |
# | 1 | slice 2 | slice 3 | slice 0 | slice 1 |
# | 2 | slice 1 | slice 2 | slice 3 | slice 0 |
#
# Follow slice 0: it leaves rank 1, passes 2 and 3, and comes to rest on rank 0. Many textbooks
# begin with the own slice instead, and then rank r ends up with slice r + 1. *About 8 minutes.*

# %% exercise zerolab.comm.ring:sent_slice
lab.check("2.3", sent_slice)

# %% [markdown] your-reduce-scatter
# ## Your turn: the reduce-scatter
#
# Put the two together. N-1 rounds, in each one `exchange` of one slice and one addition. The
# input belongs to the caller and must stay as it is. Only where `output` is a slice of it may that
# slice change, at the end. *About 15 minutes;* `lab.hint("2.4")` helps.

# %% exercise zerolab.comm.ring:reduce_scatter
lab.check("2.4", reduce_scatter)

# %% [markdown] your-messages
# The same picture, now drawn from what your function really sent.


# %% own-messages
def watched():
    n = comm.get_world_size()
    ring.reduce_scatter(torch.zeros(5), torch.ones(5 * n))
    return comm.records()


CollectiveSteps.of(on_ranks(watched), algorithm="reduce_scatter")

# %% [markdown] your-all-gather
# ## Your turn: the all-gather
#
# Nothing is added now: what arrives is finished and goes straight into its place in `output`. So
# this one needs no memory of its own. *About 10 minutes.*

# %% exercise zerolab.comm.ring:all_gather
lab.check("2.5", all_gather)

# %% [markdown] your-all-reduce
# ## Your turn: the whole ring
#
# And the sum of the two. One thing is new: N need not divide the length. Pad with zeros, as in
# chapter 00. *About 10 minutes.*

# %% exercise zerolab.comm.ring:all_reduce
lab.check("2.6", all_reduce)

# %% [markdown] seam
# ## The engine trains on it
#
# Inside `with comm.use_ring():` the engine's all-reduce, reduce-scatter and all-gather are the
# functions of `zerolab.comm.ring`, and those are yours now. First the losses, at every stage.

# %% train-on-ring
plain, on_ring = {}, {}
for stage in (0, 1, 2, 3):
    plain[stage] = lab.train(model="gpt-1m", stage=stage, dtype="fp32")
    with comm.use_ring():
        on_ring[stage] = lab.train(model="gpt-1m", stage=stage, dtype="fp32")
    pairs = zip(plain[stage].losses, on_ring[stage].losses, strict=True)
    print(f"stage {stage}: {'   '.join(f'{one:.7f} and {two:.7f}' for one, two in pairs)}")
on_ring[0]

# %% [markdown] seen-in-trace
# And where they run, in the trace of one step. A ring needs many rounds, and launching must not
# wait; so the engine's asynchronous calls run when something waits for them. Your reduce-scatter
# of one bucket stands after the call for the next one.

# %% trace
with comm.use_ring():
    tree = lab.trace(stage=1, depth=1)
tree

# %% [markdown] elements
# ## What the engine counts, and what travels
#
# The course counts *elements moved*: the full tensor of a collective, once a call, an all-reduce
# twice. That number does not depend on N, which makes stages easy to compare: 2 Psi for stage 0.
# What one rank *sends* on a ring is (N-1)/N of it. Predict how much that is here, then measure it
# on your functions.

# %% predict-ring
lab.predict("2.9", None)

# %% sent
for stage, run in on_ring.items():
    rank = run.ranks[0]
    data = [event for event in rank.records.parts if event.purpose == "data"]
    sent = sum(event.elements for event in data if event.op == "send") / run.job.steps
    print(
        f"stage {stage}: {rank.elements_moved / psi:.2f} Psi moved a step, {sent / psi:.2f} Psi "
        f"sent by each rank: {sent / rank.elements_moved:.3f} of it"
    )
for n in (ranks, 1024):
    print(f"on {n:,} ranks (N-1)/N is {traffic.ring_factor(n):.3f}")

# %% [markdown] order-of-sums
# ## The same sum, in another order
#
# The losses above agree as far as they are printed. Gradients do not, in their last bits. Addition
# in floating point depends on the order. The package's own collectives add in rank order. On a
# ring the sum of slice c begins at rank c + 1 and ends at rank c, so each slice has an order of
# its own.


# %% bits
def compare(dtype):
    luck = torch.Generator().manual_seed(comm.get_rank())
    numbers = (torch.randn(4000, generator=luck) * 100).to(dtype)
    in_rank_order, on_a_ring = numbers.clone(), numbers.clone()
    comm.all_reduce(in_rank_order)
    ring.all_reduce(on_a_ring)
    return (in_rank_order != on_a_ring).double().mean().item()


for n in (2, 3, 4):
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        differ = on_ranks(compare, dtype, n=n)[0]
        print(f"{n} ranks, {dtype}: {differ:.0%} of the sums differ in the last bits")

# %% [markdown] bits-read
# Whole numbers are exact in any order. Two ranks are exact in fp32, because a + b is b + a. From
# three ranks on compare with a tolerance, and do not look for a bug where there is none. In bf16 it
# is more than the order: your ring rounds every partial sum to 8 bits of precision before it sends
# it on, while the package adds in fp32 and rounds once. NCCL, the library of NVIDIA's GPUs, rounds
# on its ring as well. That is one reason why large trainings reduce gradients in fp32.

# %% [markdown] break-it
# ## Break one line
#
# Begin with the own slice, as the textbooks do, and leave everything else as it is. Which rank
# suffers? Guess first.

# %% broken
right = lab.running("zerolab.comm.ring:sent_slice")


def textbook(rank, world_size, step):
    return right(rank + 1, world_size, step)


with lab.plugged("zerolab.comm.ring:sent_slice", textbook), comm.use_ring():
    wrong = lab.train(model="gpt-nano", stage=0, steps=5)
with comm.use_ring():
    good = lab.train(model="gpt-nano", stage=0, steps=5)
print("right:", " ".join(f"{loss:.3f}" for loss in good.losses))
print("wrong:", " ".join(f"{loss:.3f}" for loss in wrong.losses))

# %% [markdown] broken-read
# All of them suffer alike, and nothing is reported. Every slice of the sum is correct and lies
# one rank too far. The all-gather then files it in the wrong place, so that each parameter
# receives the gradient of another one. Bytes, shapes, traffic and the number of messages are
# perfect. Only values could tell.
#
# Does your loss fall all the same, only more slowly? Then your `reduce_scatter` asks `sent_slice`
# in the first round and works out the others itself. One of the N summands of every slice is a
# wrong one, the others are right. Such a bug lives long.

# %% [markdown] hunt
# ## Find the bug
#
# This one is public. The published solution of a well-known course passes the whole tensor on in
# every round of its "ring all-reduce" and calls the first half a reduce-scatter, which it is not
# (ARENA, distributed training exercises, as of January 2026). Its test compares values only, and
# the values are right. Below, somebody has replaced your `all_reduce`. Name the belief behind it.

# %% bug-hunt
lab.bug_hunt("2.6", number=3)

# %% [markdown] three-hangs
# ## Three ways to hang
#
# In practice ranks do not hang in their own rings. They hang because they do not run the same
# program. The three classics, each with its table.
#
# **One rank goes elsewhere.** `if rank == 0: evaluate()`, with a collective inside, or one rank
# that has a batch less than the others.


# %% missing-rank
def evaluates_on_rank_0():
    loss = torch.ones(1)
    if comm.get_rank() == 0:
        comm.all_reduce(loss, "avg")


stuck(evaluates_on_rank_0)

# %% [markdown] order
# **Another order.** Two collectives, each rank makes both, and not in the same order. It happens
# where a loop runs over a `set`, or where calls are made in the order in which data arrives.


# %% order-mismatch
def in_two_orders():
    gradient, norm = torch.ones(8), torch.ones(1)
    tensors = (gradient, norm) if comm.get_rank() % 2 else (norm, gradient)
    for tensor in tensors:
        comm.all_reduce(tensor)


stuck(in_two_orders)

# %% [markdown] shape
# **Another shape.** The last batch of one rank is shorter, or a buffer was padded on one rank and
# not on the other. With gloo, torch's library for CPUs, this ends the process; with equal byte
# counts and other dtypes the result is silent garbage. Here it is a sentence.


# %% shape-mismatch
def padded_on_one_rank():
    numel = 12 if comm.get_rank() else 10
    comm.all_reduce(torch.ones(numel))


stuck(padded_on_one_rank)

# %% [markdown] how-to-read
# Read such a table from the odd row: the rank that returned, raised, or sits in another call is
# the one to ask. The others only wait. (A contradiction ends the run at once, so in the last two
# tables some ranks had not had their turn.) Two rules prevent all three: every rank makes the
# same calls in the same order, and no call stands behind an `if` that depends on the rank or on
# its data.

# %% [markdown] forgotten
# ## The wait that was forgotten
#
# An asynchronous call does not hang, which is worse. Until `wait()` the result is not there;
# whoever reads it computes with what happens to lie in memory. In this world that is NaN, on
# purpose.


# %% forgotten-wait
def forgets():
    gradient = torch.ones(3)
    work = comm.all_reduce(gradient, async_op=True)
    too_early = gradient.tolist()
    work.wait()
    return too_early, gradient.tolist()


print(on_ranks(forgets)[0])

# %% [markdown] cost
# ## What it costs
#
# A message takes *latency* plus bytes divided by *bandwidth*, alpha + n / beta. A collective
# takes as many messages as its slowest rank sends one after the other. Write that for the ring.
# *About 6 minutes.*

# %% exercise zerolab.sim.links:ring_seconds
lab.check("2.7", ring_seconds)

# %% [markdown] cost-read
# Try it where it hurts. On a link of 5 microseconds and 25 GB/s, who is faster?

# %% crossover
link = {"latency": 5e-6, "bandwidth": 25e9}  # assumed, for a network between machines
print("seconds of one all-reduce:     ring        tree        star")
for nbytes in (4, 2**20, 2**30):
    for n in (8, 1024):
        times = [f(nbytes, n, **link) for f in (links.ring_seconds, links.tree_seconds)]
        times.append(links.star_seconds(nbytes, n, **link))
        print(f"{nbytes:13,} bytes, {n:4} ranks  " + "  ".join(f"{t:10.6f}" for t in times))
for n in (8, 1024):
    size = links.crossover_bytes(n, **link)
    print(f"{n} ranks: above {size / 2**20:.2f} MiB the ring is faster than this tree")

# %% [markdown] measured-heading
# ## Measured: small messages and large ones
#
# Now real processes and a real library, gloo over the loopback of this machine. First single
# messages, small and large: that gives alpha and beta. Then the model has to predict what your
# all-reduce takes. These figures are *measured here and now*, with all ranks sharing the cores of
# one machine. They say nothing about a cluster, and they will be different next time.

# %% measured
import time


def seconds(repeats, call, *tensors):
    took = []
    for _ in range(1 + repeats):  # the first call opens the connections
        comm.barrier()
        begin = time.perf_counter()
        call(*tensors)
        took.append(time.perf_counter() - begin)
    return min(took[1:])  # of the undisturbed one


def ten_rounds(here, there):
    for _ in range(5):
        ring.exchange(here, there)
        ring.exchange(there, here)


def measure(plan):
    found = {}
    for numel, repeats in plan:
        here, there = torch.ones(numel), torch.zeros(numel)
        found["message", numel] = seconds(repeats, ten_rounds, here, there) / 10
        found["ring", numel] = seconds(repeats, ring.all_reduce, there)
        found["star", numel] = seconds(repeats, star.sum_everywhere, there)
    return found


plan = ((1, 20), (2**14, 10), (2**20, 5))  # elements, repeats
took = zerolab.run(measure, ranks, "gloo", args=(plan,), ledger=False)[0]
smallest, largest = plan[0][0], plan[-1][0]
alpha, beta = links.fitted(
    (4 * smallest, took["message", smallest]), (4 * largest, took["message", largest])
)
print(f"measured on gloo: alpha {alpha * 1e6:.0f} microseconds, beta {beta / 1e9:.2f} GB/s")
for numel, _ in plan:
    model = links.ring_seconds(4 * numel, ranks, alpha, beta)
    print(
        f"{4 * numel:9,} bytes: your ring {took['ring', numel] * 1e3:7.2f} ms, the model says "
        f"{model * 1e3:7.2f} ms; your sum_everywhere {took['star', numel] * 1e3:7.2f} ms"
    )

# %% [markdown] measured-read
# Two things to read. A tensor a million times as long takes nowhere near a million times as long:
# short tensors cost messages, long ones cost bytes. Chapter 03 builds *buckets* because of this,
# the gradients of many small tensors in one message. Where your ring takes longer than the model
# says, its ranks waited for a core: alpha plus n / beta knows no such queue.
#
# And if your `sum_everywhere` is a star, it beats the ring at the short end, and on this machine
# perhaps at the long end too. That is no mistake. All lines are the same memory here, so what
# counts is all bytes together, and these are equal: 2 (N-1) tensors, with a star as with a ring.
# The star sends them in 2 (N-1) messages, the ring in 2 N (N-1). A ring pays where every rank has
# a line of its own. The best algorithm depends on the wires, and a measurement on other wires
# proves little.

# %% [markdown] claims
# ## What people say about traffic
#
# The articles that many prepare with disagree with each other here. One has a table,
# "communication: stage 0 medium, stage 1 low, stage 2 medium, stage 3 high". It says that stage 1
# "reduces the transfer of optimizer state", that stage 2 "lowers gradient synchronisation", and
# further down that stage 2 costs more than stage 1. A second says that stage 1 has "the least
# communication", and that communication grows with the number of cards. A third says that stage 2
# pays "a small additional communication". Ask the records.

# %% by-stage
from collections import Counter

for stage, run in plain.items():
    moved = Counter()
    for event in run.ranks[0].records.collectives:
        if event.purpose == "data":
            moved[event.op] += event.elements / psi / run.job.steps
    words = ", ".join(f"{op} {elements:.2f} Psi" for op, elements in moved.items())
    print(f"stage {stage}: {run.ranks[0].elements_moved / psi:.2f} Psi a step ({words})")

# %% [markdown] claims-settled
# - Stages 0, 1 and 2 move the same: an all-reduce is a reduce-scatter and an all-gather, and the
#   two stages only put the optimizer's step in between. Not low, not medium: equal. Nothing
#   "additional" either.
# - Optimizer state never travels, at no stage. What stages 1 and 2 add is an all-gather of
#   *parameters* at the end of the step. The articles' table of "key communication" leaves that
#   out, and stage 3's second all-gather, the one in backward.
# - Stage 3 moves half as much again. Whether that is "significant" is decided by latency and by
#   what it can hide behind: it has far more calls.
# - More cards hardly mean more bytes a card: (N-1)/N, printed above for this notebook's ranks and
#   for 1,024, is never more than 1. What grows is the number of messages.
#
# One warning for interviews: that is the paper, and this engine. DeepSpeed's stages 1 and 2, as
# released (0.19.8, read and measured), all-reduce each bucket and keep the own slice: 3 Psi a
# step. Its key `reduce_scatter: true` does not mean what it says.

# %% [markdown] bridge
# ## The same with torch alone
#
# Another article shows the two collectives in two lines of torch. Here they are on two gloo
# ranks, word for word, and below them what the functions really want.

# %% torch-lines
from torch import distributed as dist


def article_lines():
    part, local_grad = torch.ones(3), torch.ones(6)
    said = []
    try:
        torch.cat(dist.all_gather(part), dim=0)
    except Exception as error:
        said.append(f"all_gather: {type(error).__name__}: {error}")
    try:
        dist.reduce_scatter(torch.zeros_like(local_grad), local_grad)
    except Exception as error:
        first_line = str(error).splitlines()[0]
        said.append(f"reduce_scatter: {type(error).__name__}: {first_line}")
    full, shard = torch.empty(6), torch.empty(3)
    dist.all_gather_single(full, part)
    dist.reduce_scatter_single(shard, local_grad)
    return [*said, f"as it should be: {full.tolist()}, {shard.tolist()} (a sum: divide by N)"]


print("\n".join(zerolab.run(article_lines, 2, "gloo", ledger=False)[0]))

# %% [markdown] ddp
# And a whole training: torch's own `DistributedDataParallel`, and your ring, with the same model
# and data on two gloo ranks.


# %% torch-ddp
def with_the_ring(gradient):
    ring.all_reduce(gradient.view(-1))


def torch_ddp(steps=5):
    model = nn.parallel.DistributedDataParallel(two_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        inputs, targets = batch(comm.get_rank(), step)
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


theirs = zerolab.run(torch_ddp, 2, "gloo", ledger=False)[0]
ours = zerolab.run(data_parallel, 2, "gloo", args=(with_the_ring,), ledger=False)[0][0]
print("torch's DDP:", " ".join(f"{loss:.6f}" for loss in theirs))
print("your ring:  ", " ".join(f"{loss:.6f}" for loss in ours))

# %% [markdown] deepspeed
# In DeepSpeed nobody writes a ring: NCCL has rings and trees and chooses by size (`NCCL_ALGO`
# overrules it). What the configuration decides is which collective is called, and how much at a
# time:
#
# ```json
# {"zero_optimization": {"stage": 2, "reduce_scatter": true, "reduce_bucket_size": 5e8}}
# ```
#
# The last number counts elements, not bytes. And read `reduce_scatter` with the warning above.

# %% [markdown] answer-heading
# ## The answer
#
# One all-reduce on your functions, on more and more ranks.

# %% answer
numel = 8 * 3 * 5 * 7
for n in (2, 3, 4, 8, 15):
    sends = on_ranks(messages_of, ring, "all_reduce", numel, n=n)
    sent = {sum(event.elements for event in rank) for rank in sends}
    assert sent == {links.ring_sent_elements(numel, n)}
    share = sent.pop() / numel
    print(f"{n:2} ranks: each sends {share:.3f} tensors, 2 (N-1)/N = {2 * (n - 1) / n:.3f}")

# %% [markdown] answered
# Every rank sends less than two tensors, and no rank sends more than another. More ranks do not
# change that. They change how many messages there are: 2 (N-1).

# %% record
import inspect

for name in ("exchange", "sent_slice", "reduce_scatter", "all_gather", "all_reduce"):
    lines = inspect.getsource(globals()[name]).split('"""')[-1].strip().splitlines()
    print(f"{name:15} {len(lines):2} lines below the docstring")
records = on_ring[0].ranks[0].records
sums = [event for event in records.collectives if event.purpose == "data"]
messages = [event for event in records.parts if event.op == "send" and event.purpose == "data"]
print(f"{len(sums)} all-reduces, all of 2 steps at stage 0, were {len(messages)} messages a rank")

# %% [markdown] interview
# ## In the interview
#
# *"How does an all-reduce work, and what does it cost?"*
#
# **30 seconds.** An all-reduce is a reduce-scatter and an all-gather. On a ring both take N-1
# rounds, in which every rank sends one N-th of the tensor to its neighbour. So each rank sends 2
# (N-1)/N times the tensor: less than twice its size, however many ranks there are. The price is 2
# (N-1) latencies, and so small tensors are better off in a tree or in a bucket.
#
# **Two minutes.** Add: a parameter server sends N-1 tensors through one line; a tree sends whole
# tensors, few times. In the alpha-beta model the ring takes 2 (N-1) (alpha + n / (N beta)). The
# tree's 2 log2 N rounds win below a size that grows with alpha beta. Libraries switch between
# them, and use the hierarchy: inside the machine first, then between machines. ZeRO-1 and 2 move
# the same 2 Psi, because they put the optimizer between the two halves; ZeRO-3 gathers twice, 3
# Psi. Sums on a ring are in another order for every slice, so tests compare with a tolerance from
# three ranks on. And when it hangs I look for the rank that is not in the call: one that
# returned, raised, or takes another branch.
#
# **Follow-ups.** With N = 3, where N does not divide the length? With a message of four bytes on
# 64 ranks? What if one rank is late? Each is a cell:


# %% follow-ups
def late():
    if comm.get_rank() == 1:
        time.sleep(0.2)
    begin = time.perf_counter()
    ring.all_reduce(torch.ones(12))
    return time.perf_counter() - begin


print(f"7 elements on 3 ranks: each sends {links.ring_sent_elements(7, 3)}, the padding too")
tiny = [f(4, 64, **link) for f in (links.ring_seconds, links.tree_seconds)]
print(f"4 bytes on 64 ranks: the ring takes {tiny[0] / tiny[1]:.1f} times as long as the tree")
waits = zerolab.run(late, ranks, "gloo", ledger=False)
print("one rank comes 0.2 s late; in the call were", " ".join(f"{w:.2f} s" for w in waits))

# %% [markdown] quiz-heading
# ## Questions

# %% quiz
lab.quiz("02")

# %% [markdown] summary
# ## Where you are
#
# | | |
# |---|---|
# | **all-reduce** | reduce-scatter, then all-gather |
# | **a rank sends** | (N-1)/N for each half, 2 (N-1)/N in all; nearly constant in N |
# | **elements moved** | the course's count: the full tensor once a call, an all-reduce twice |
# | **time** | 2 (N-1) latencies, and bytes divided by bandwidth |
# | **stages 0, 1, 2, 3** | 2, 2, 2, 3 Psi a step |
# | **deadlock** | the ranks do not make the same calls in the same order: look for the odd row |
# | **order of sums** | exact for two ranks and whole numbers, else compare with a tolerance |
#
# Your ring is finished. But in the cell `two-layers` every gradient was sent by itself, after
# backward had ended, while the network lay idle during backward and the processors during the
# sending. Chapter 03 asks: can a rank send gradients while it still computes others?
