# %% [markdown] title
# # Data parallelism
#
# **The question.** Several ranks train one model, each on its own part of the batch. After every
# backward each of them has gradients that all the others need. How many numbers must cross the
# network in a step, how many of them can travel while backward still computes, and what does
# gradient accumulation change about it? The last measurement of this chapter answers.
#
# *Estimated 135 minutes. You need chapters 00 to 02. You build stage 0: buckets, the hook that
# fills them, the order in which they leave, what happens when backward is over, and the equation
# of batch sizes. The stages of the next chapters are differences to it.*

# %% begin
import contextlib
import inspect

import torch
from torch import nn
from torch.nn import functional as F

import zerolab
from zerolab import comm, data, device, gpt, lab
from zerolab.sim import estimate
from zerolab_widgets import DeadlockTable, EngineMap, LiveDashboard, QuizCard, StepTimeline

lab.begin("03")
ranks = lab.world_size()
shape = gpt.preset("gpt-nano")
psi = gpt.num_params(shape)  # Psi, a count of parameters
print(f"{psi:,} parameters, {ranks} ranks")

# %% [markdown] recall-heading
# ## Before you begin
#
# Three questions from earlier chapters. What you can recall without looking stays with you.

# %% recall
QuizCard(lab.quiz("03", part="recall"))

# %% [markdown] one-gpu-heading
# ## One GPU is too small for the batch
#
# This is the loop that you know, on one rank. A step shall use 8 samples for every rank that we
# will have later. First it runs without a limit, to see what it needs; then on a GPU with half of
# that.


# %% one-gpu
def plain_loop(samples, pieces):
    """Train two steps on one GPU; a step's samples come in one piece, or in several."""
    torch.manual_seed(0)
    model = gpt.GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    stream = data.batches(data.load_text(), 0, 1, samples, shape.seq_len, seed=0)
    losses = []
    for _ in range(2):
        tokens, targets = next(stream)
        optimizer.zero_grad()
        total = 0.0
        for part, goal in zip(tokens.chunk(pieces), targets.chunk(pieces), strict=True):
            loss = model(part, goal) / pieces
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, device.current().peak_bytes


[(alone, peak)] = zerolab.run(plain_loop, world_size=1, args=(8 * ranks, 1))
ceiling = peak // 2
print(f"{8 * ranks} samples on one GPU: {peak / 2**20:.1f} MiB, losses {alone}")
try:
    zerolab.run(plain_loop, world_size=1, gpu_memory=ceiling, args=(8 * ranks, 1))
except torch.OutOfMemoryError as error:
    print(str(error).splitlines()[0][:160])

# %% [markdown] why-out
# Parameters, gradients and averages are small here. What fills the GPU is activations: they grow
# with the samples. There are two ways out.
#
# - **Accumulation.** Cut the samples into pieces that fit, add the gradients of the pieces up, and
#   update once. It costs time: the pieces come one after the other.
# - **Data parallelism.** Give each piece to another GPU. The pieces are computed at the same time,
#   and the gradients must be added up *between* GPUs.

# %% in-pieces
[(pieces, peak)] = zerolab.run(plain_loop, 1, gpu_memory=ceiling, args=(8 * ranks, ranks))
print(f"in {ranks} pieces: {peak / 2**20:.1f} MiB, losses {pieces}")
print(f"apart by at most {max(abs(a - b) for a, b in zip(alone, pieces, strict=True)):.1e}")

# %% [markdown] class
# ## Four pupils, four quarters of the exam
#
# Four pupils revise with the same set of books. They divide not the books but the exercises: each
# solves a quarter of an old exam. Before anybody corrects a margin note, they compare. What goes
# into the books is the *mean* of what the four found, so that afterwards all four sets of books are
# the same again, to the letter.
#
# So three things must hold:
#
# | must hold | or else |
# |---|---|
# | all begin with the same weights | equal corrections to unequal books: they stay unequal |
# | gradients are averaged, not summed | with SGD, N times the learning rate that was asked for |
# | every rank takes part every time | the others wait for it for ever |
#
# Why the mean? The loss is a mean over samples, and all ranks have equally many of them: so the
# mean of the ranks' gradients *is* the gradient of the whole batch. Tiny-DeepSpeed, a public
# teaching engine, sums. With Adam nobody notices for a long time; the quiz asks why.

# %% [markdown] blank-heading
# ## An empty page
#
# Build the idea before the parts. Two layers, torch and `comm`, at most forty lines. The docstring
# says what comes out, what may be sent, when, and what a rank may hold. How is yours.
#
# Two things you may not have met. `param.register_post_accumulate_grad_hook(f)` lets autograd call
# `f(param)` when it has put that parameter's gradient into `param.grad`; it returns a handle with
# `remove()`. And `comm.all_reduce(tensor, "avg", async_op=True)` returns at once, a `Work`, and
# `tensor` must not be touched before `work.wait()`.
#
# *About 25 minutes, difficulty 3 of 4;* `lab.hint("3.1")` helps in three steps.

# %% exercise zerolab.two_layers.data_parallel:train_data_parallel
lab.check("3.1", train_data_parallel)

# %% [markdown] blank-why
# The check asked *when*, and not only *what*. Assignment 2 of Stanford's CS336 (2026) asks for data
# parallelism "with overlap", and its tests compare weights; an all-reduce after backward passes all
# of them. Here is that answer against this check.


# %% famous-answer
from zerolab.lab import evaluate, exercise


def famous_answer(model, batches, make_optimizer):
    for param in model.parameters():
        comm.broadcast(param.data, src=0, purpose="control")
    optimizer = make_optimizer(model.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(model(inputs), targets).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        flat_grad = torch.cat([grad.reshape(-1) for grad in grads])
        comm.all_reduce(flat_grad, "avg")
        pieces = flat_grad.split([grad.numel() for grad in grads])
        for param, piece in zip(model.parameters(), pieces, strict=True):
            param.grad = piece.view_as(param)
        optimizer.step()


report = evaluate.evaluate(exercise.find("3.1"), famous_answer)
print("proven:", *report.proven, sep="\n  ")
print(f"{report.outcome}: {report.message}")

# %% [markdown] arrival-heading
# ## When is a gradient there?
#
# One buffer for the whole model leaves when the very last gradient has come: backward is over by
# then. To send earlier, one must know in which order gradients come.


# %% arrival tags=nbval-check-output
def arrivals():
    """Return the parts of the model in the order in which their first gradient comes."""
    model = gpt.GPT(shape)
    order = []
    for name, param in model.named_parameters():
        part = ".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0]
        param.register_post_accumulate_grad_hook(lambda _, part=part: order.append(part))
    tokens, targets = next(data.batches(data.load_text(), 0, 1, 1, shape.seq_len, seed=0))
    model(tokens, targets).backward()
    return list(dict.fromkeys(order))


print("in the model:   ", ", ".join(name for name, _ in gpt.GPT(shape).named_children()))
print("gradients come: ", ", ".join(arrivals()))

# %% [markdown] reverse
# From the last block to the first: backward walks the model in reverse. The embedding comes last
# although the head uses it too: the weights are *tied*, and autograd has added both uses up before
# it calls the hook.
#
# So group parameters from the last one on. Such a group is a **bucket**: it leaves when all its
# gradients are there, while backward goes on with the layers before.

# %% [markdown] bucket-size
# ## How large should a bucket be?
#
# Each collective pays a latency, however little it carries: many small buckets pay it often. A
# large bucket leaves late, and the last one always leaves after backward: nothing is left to hide
# behind. Chapter 02's cost model, for 100 million gradients in bf16 on 8 GPUs (20
# microseconds a message, 50 GB/s), and a backward of 60 ms that delivers them evenly:


# %% bucket-cost tags=nbval-check-output
def step_time(num_buckets, *, num_grads=100e6, world_size=8, backward=0.060):
    """Return (time on the network, time after the end of backward), in seconds."""
    message, bandwidth = 20e-6, 50e9
    each = 2 * (world_size - 1) * message
    each += 2 * estimate.ring_factor(world_size) * 2 * num_grads / num_buckets / bandwidth
    free = 0.0  # when the network is done with the bucket before
    for number in range(1, num_buckets + 1):
        free = max(free, backward * number / num_buckets) + each
    return num_buckets * each, free - backward


for num_buckets in (1, 2, 4, 8, 16, 64, 256, 1024):
    total, exposed = step_time(num_buckets)
    size = 200 / num_buckets
    print(
        f"{num_buckets:>5} buckets of {size:>6.1f} MB: network {1e3 * total:>6.1f} ms, "
        f"of which after backward {1e3 * exposed:>6.1f} ms"
    )

# %% [markdown] bucket-size-read
# One bucket hides nothing. A thousand are slower than no overlap at all: the network has become the
# bottleneck. In between the exposed time is about that of one bucket. torch's DDP takes 25 MiB
# (`bucket_cap_mb` in its documentation), and 1 MiB for the first bucket, so that something leaves
# early. DeepSpeed counts elements: `reduce_bucket_size`, 5e8 by default, a gigabyte in 16 bits.

# %% [markdown] your-turn-plan
# ## Your turn: fill the buckets
#
# The first *part* of the engine. *About 8 minutes, difficulty 1;* `lab.hint("3.2")` helps.

# %% exercise zerolab.flat:plan_buckets
lab.check("3.2", plan_buckets)


# %% your-buckets tags=nbval-check-output
def layout(limit):
    """Build the engine and return (name, parameters, elements) of each bucket."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 0, "reduce_bucket_size": limit},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = zerolab.initialize(model=gpt.GPT(shape), config=config)
    found = [(b.name, len(b.slots), b.numel) for b in engine.sharding.buckets]
    engine.close()
    return found


for limit in (2**20, 20_000):
    print(f"at most {limit:,} elements a bucket:")
    for name, number, numel in zerolab.run(layout, world_size=1, args=(limit,))[0]:
        print(f"   {name:10} {number:>3} parameters {numel:>8,} elements")

# %% [markdown] units
# A bucket never crosses the border of a block, because stage 3 will gather block by block, and the
# cut is the same at every stage. That is also why all stages compute the same bits.

# %% [markdown] your-turn-collect
# ## Your turn: the hook
#
# Now four *moments*, the heart of the stage. The engine has registered a hook on every parameter;
# when it fires, `collect` takes the gradient out of the parameter and puts it into its bucket.
#
# `bucket.slots[position]` is the parameter's place: `slot.param`, `slot.offset`, `slot.shape`.
# `flat.view(buffer, start, shape)` is a piece of a flat buffer as a tensor of that shape, and
# `with device.tag(kind):` says under which kind of memory an allocation counts. A gradient may be
# sparse: `grad.to_dense()`. *About 12 minutes, difficulty 2;* `lab.hint("3.3")` helps.

# %% exercise zerolab.bucket:collect
lab.check("3.3", collect)

# %% [markdown] order-heading
# ## A collective has no name tag
#
# Rank 0 calls its third all-reduce, rank 1 calls its third: they are added up, whatever is in them.
# Nothing in the network says "this is block 2". Now take a model in which ranks go different ways:
# gradients then come in another order, and "whatever is complete leaves" adds up unlike things.
# What tells the ranks which bucket they are talking about is the order alone.

# %% [markdown] your-turn-post
# ## Your turn: whose turn is it?
#
# `post_backward` is called whenever a bucket has become complete. Send what may be sent, strictly
# in index order. *About 12 minutes, difficulty 3;* `lab.hint("3.4")` helps.

# %% exercise zerolab.reducing:post_backward
lab.check("3.4", post_backward)

# %% [markdown] predict-heading
# ## Predict, then measure
#
# Put a number in the place of `None`. Nothing is measured before.

# %% predict-overlap
lab.predict("3.8", None)

# %% [markdown] break-heading
# ## Break one line
#
# An impatient colleague sends whatever is complete. The model below has two branches, and odd ranks
# take them in the other order. Which rank notices? Decide, then run.


# %% break
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right, self.head = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        hidden = torch.tanh(self.stem(x))
        way = (self.left, self.right) if comm.get_rank() % 2 == 0 else (self.right, self.left)
        for layer in way:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def train_branches():
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 16 * 16 + 16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = zerolab.initialize(model=Branches(), config=config)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(comm.get_rank()))
    engine.backward(engine(x).pow(2).mean())
    engine.step()
    return [e.label for e in comm.records().collectives if e.purpose == "data"]


def impatient(stage):
    for bucket in stage.trainable:
        if bucket.complete and bucket.state.name == "FILLING":
            stage.launch(bucket)
            stage.next_launch += 1


print("sent by the last rank:", zerolab.run(train_branches, world_size=ranks)[-1])
torn = None
with lab.plugged("zerolab.reducing:post_backward", impatient):
    try:
        sent = zerolab.run(train_branches, world_size=ranks)
        print(f"nobody noticed: rank 0 sent {sent[0]}, the last rank {sent[-1]}")
    except zerolab.DeadlockError as error:
        torn = error
        print(str(torn).splitlines()[0])
DeadlockTable(torn) if torn else None

# %% [markdown] broken
# Here the collectives carry labels, so that the run stops at the first call that does not match:
# rank 1 sends `root/2` where rank 0 has sent `root/1`. The table shows where each rank was then.
# NCCL and gloo by themselves have no labels, and both buckets are equally long. On real GPUs the
# same mistake adds the left branch of one rank to the right branch of another, and trains on it
# without a word.

# %% [markdown] unused-heading
# ## When backward is over
#
# Not every gradient comes. A rank may not have used a parameter in this micro-batch: an expert that
# no token chose, a branch not taken. Its hook never fires, its bucket is never complete, and those
# behind it never get their turn. torch's DDP raises an error in the next forward, or walks the
# graph before every backward to find out (`find_unused_parameters=True`). Here backward has a clear
# end, and what has not left by then leaves then. What is missing counts as zeros in the mean.
#
# The opposite happens too. Under torch's older, reentrant kind of activation checkpointing a
# parameter that is used twice gets two gradients, and the second may come when its bucket has left.
# No rank may send that bucket again on its own, since only it knows. The gradient waits where it
# is; before the update the ranks exchange a few flags anyway, one of them asks "has anybody a late
# gradient?", and only then all of them send that bucket once more.

# %% [markdown] your-turn-finish
# ## Your turn: the end of backward
#
# *About 15 minutes, difficulty 3;* `lab.hint("3.5")` helps.

# %% exercise zerolab.reducing:finish_backward
lab.check("3.5", finish_backward)

# %% [markdown] your-turn-receive
# ## Your turn: the mean comes home
#
# The last moment: a bucket that was sent is received. The mean is kept for the optimizer, or added
# to what earlier micro-steps of the same step have left. *About 8 minutes, difficulty 2;*
# `lab.hint("3.6")` helps.

# %% exercise zerolab.reducing:receive
lab.check("3.6", receive)

# %% [markdown] fits-heading
# ## The run that did not fit
#
# The same samples, the same ceiling for each GPU, one piece a rank. The engine underneath runs on
# what you have written; the last line of the card says so.

# %% fits
run = lab.train(
    model="gpt-nano", dtype="fp32", micro_batch_size=8, gpu_memory=ceiling, watch=LiveDashboard()
)
run

# %% whose
print("one GPU, without a limit: ", [f"{loss:.6f}" for loss in alone])
print(f"{ranks} GPUs, half the memory: ", [f"{loss:.6f}" for loss in run.losses])
lab.running()

# %% [markdown] equal-not-identical
# Equal to the last digit or nearly, not to the last bit: sums are taken in another order, and
# floating point remembers the order. An article says that the mathematics does not change. It does
# not, and the bits do: one compares with a tolerance. Within this engine the order is fixed, and
# stages 0 to 3 agree bit for bit.

# %% [markdown] trace-heading
# ## One step, call by call
#
# `yours` marks what you wrote. Find the last all-reduce of backward, and who called it.

# %% trace
lab.trace(stage=0, depth=2)

# %% [markdown] timeline-heading
# ## In lanes
#
# The same as a picture, from the run above. On process ranks it shows time, and what of it is
# exposed. Lockstep ranks take turns, so there it shows order: a collective counts as hidden if the
# rank computed anything between sending and waiting. The last bucket has nothing to hide behind:
# backward is over, and the rank only lets go of memory.

# %% timeline
StepTimeline(run)

# %% [markdown] map-heading
# And as a map: the functions of the engine by module and by moment. What is lit is yours.

# %% map
EngineMap(run)

# %% [markdown] ring-heading
# ## On your ring
#
# In chapter 02 you wrote a ring reduce-scatter and all-gather over `send` and `recv`. Nothing below
# the stage needs to be more than that. Inside `comm.use_ring()` every collective of the engine goes
# round the ring, message by message.

# %% ring
with comm.use_ring():
    by_ring = lab.train(model="gpt-nano", dtype="fp32", micro_batch_size=8)
parts = by_ring.ranks[0].records.parts
sent = sum(event.elements for event in parts if event.op == "send") / by_ring.job.steps
moved = by_ring.ranks[0].elements_moved
print("losses", [f"{loss:.6f}" for loss in by_ring.losses])
print("before", [f"{loss:.6f}" for loss in run.losses])
print(f"moved {moved / psi:.3f} Psi a step; rank 0 sent {sent / moved:.4f} of that")
print(f"(N - 1)/N = {estimate.ring_factor(ranks):.4f}")

# %% [markdown] accumulation-heading
# ## Accumulation and data parallelism together
#
# Both ways out combine: N ranks, and on each G micro-batches one after the other before the update.
# A step then uses
#
# `train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x N`
#
# samples, the *batch equation*. A configuration names one to three of the numbers, and DeepSpeed
# infers the others.

# %% [markdown] your-turn-infer
# ## Your turn: the batch equation
#
# *About 8 minutes, difficulty 1;* `lab.hint("3.7")` helps.

# %% exercise zerolab.config.triad:infer
lab.check("3.7", infer)

# %% [markdown] article-config
# An article offers a ready configuration with `train_batch_size` 16 and
# `gradient_accumulation_steps` 4, and starts it on 8 GPUs. What does your function make of that?

# %% article-triad
from zerolab import config
from zerolab.config import triad

print(triad.infer(16, None, 4, 8))
for gpus in (1, 2, 4, 8):
    try:
        cfg = config.load({"train_batch_size": 16, "gradient_accumulation_steps": 4}, gpus)
        print(f"on {gpus}: micro-batch {cfg.micro_batch_size}")
    except zerolab.UsageError as error:
        print(f"on {gpus}: {error}")

# %% [markdown] when-to-reduce
# ## When to reduce
#
# With G micro-steps there is a choice. Reduce after each one, or let the gradients pile up at home
# and reduce the sum once, at the *boundary*. The update is the same. Is the traffic?

# %% predict-traffic
lab.predict("3.9", None)


# %% schedules tags=nbval-check-output
def one_step(accum, reduce="boundary", limit=2**20, local=False):
    """Train one step; return elements moved, reductions, those sent in backward, and weights."""
    torch.manual_seed(0)
    model = gpt.GPT(shape)
    sent = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: sent.append(num_reductions()))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accum if not local else 1,
        "zero_optimization": {"stage": 0, "reduce_bucket_size": limit},
        "zerolab": {"reduce": reduce},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
    }
    engine, *_ = zerolab.initialize(model=model, config=config)
    stream = data.batches(data.load_text(), comm.get_rank(), ranks, 1, shape.seq_len, seed=0)
    for number in range(accum):
        alone = local and number < accum - 1
        with engine.no_sync() if alone else contextlib.nullcontext():
            loss = engine(*next(stream))
            engine.backward(loss / accum if local else loss)
        if not alone:
            engine.step()
    engine.close()
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    events = [e for e in comm.records().collectives if e.purpose == "data"]
    moved = sum(2 * event.elements for event in events)  # an all-reduce counts twice
    return moved, len(events), sent[-1], weights


def num_reductions():
    return sum(event.purpose == "data" for event in comm.records().collectives)


for accum in (1, 2, 4):
    for reduce in ("boundary", "micro_step"):
        moved, calls, _, _ = zerolab.run(one_step, ranks, args=(accum, reduce))[0]
        print(f"G = {accum}, reduced at each {reduce:10}: {moved / psi:.3f} Psi, {calls} calls")

# %% [markdown] schedules-read
# At the boundary a step moves 2 Psi, whatever G is; after every micro-step 2 G Psi. So for stages 0
# and 1 the sentence "accumulation reduces the number of synchronisations" is true. It is often
# said without the stages. Stages 2 and 3 have given away the room in which whole gradients could
# pile up, so they reduce in every micro-step. Chapter 05 measures that.
#
# An article writes the update as "weights minus learning rate times the mean of G gradients". That
# is SGD; Adam does something else with the same mean. And somebody has to take it: DeepSpeed, and
# this engine, divide the *loss* by G in `engine.backward`, once.
#
# DDP has a block for it, `no_sync()`, and so has DeepSpeed at stages 0 and 1. Inside it gradients
# stay local, and the first backward after it reduces the sum. Nothing divides by G for you then.

# %% no-sync
by_config = zerolab.run(one_step, ranks, args=(4,))[0]
by_hand = zerolab.run(one_step, ranks, args=(4, "boundary", 2**20, True))[0]
apart = (by_config[3] - by_hand[3]).abs().max().item()
print(f"no_sync by hand: {by_hand[0] / psi:.3f} Psi, {by_hand[1]} calls; weights apart {apart:.1e}")

# %% [markdown] answer-heading
# ## The answer
#
# The last measurement: numbers that cross the network in one step, and how many of the reductions
# were on their way when the last gradient came.

# %% answer tags=nbval-check-output
for limit, accum in ((2**20, 1), (20_000, 1), (4_000, 1), (20_000, 4)):
    moved, calls, early, _ = zerolab.run(one_step, ranks, args=(accum, "boundary", limit))[0]
    print(
        f"buckets of {limit:>9,}, G = {accum}: {moved / psi:.3f} Psi in {calls:>2} calls, "
        f"{early:>2} of them before the last gradient"
    )

# %% [markdown] answered
# 2 Psi a step, for any number of ranks, buckets and micro-steps; where N does not divide a bucket,
# a few elements of padding come on top. A rank really sends (N - 1)/N of that. So more GPUs do not
# mean more bytes for each (another article says they do); they mean more messages. All but the last
# bucket can leave while backward computes; the smaller the buckets, the smaller the part that
# cannot, and the more calls. And accumulation divides the traffic of a *sample* by G.
#
# What data parallelism does not change is what a rank holds: all parameters, all gradients, all of
# the optimizer.

# %% [markdown] record-heading
# ## Beside the formula
#
# Your personal record: what your engine held and moved, and what the closed form says.

# %% record
from zerolab.lab import plug

sizes = estimate.layout(gpt.GPT(shape), estimate.BUCKET_NUMEL, ranks)
formula = estimate.state_bytes(0, "fp32", sizes)
print("held   ", {kind: f"{size:,}" for kind, size in run.ranks[0].state_bytes.items()})
print("formula", {kind: f"{size:,}" for kind, size in formula.items()})
print(f"moved   {run.ranks[0].elements_moved:,} elements in the last step")
print(f"formula {estimate.elements_moved_by(sizes, 0):,}")
calls = [e for e in run.ranks[0].records.collectives if e.purpose == "data"]
print(f"calls   {len(calls) // run.job.steps} all-reduces a step, for {len(sizes.trained)} buckets")
mine = [t for t in plug.entries() if "two_layers" not in t]
lines = sum(len(inspect.getsource(plug.entries()[t].written).splitlines()) for t in mine)
print(f"at the peak {run.peak_bytes / 2**20:.2f} MiB; {lines} lines of yours, docstrings included")

# %% [markdown] diff-heading
# ## The stage, against the loop that you know
#
# A stage adds to the plain loop only what stands between backward and the update. In the engine the
# methods of `ddp.DDP` call your functions:

# %% diff
from zerolab import ddp

for name in ("grad_ready", "post_backward", "launch", "reduce", "receive"):
    print(inspect.getsource(getattr(ddp.DDP, name)))

# %% [markdown] diff-read
# `reduce` is the only method that names a collective. Stage 1 will replace that method, and little
# else.

# %% [markdown] hunt-heading
# ## Find the bug
#
# Somebody has replaced `collect`, and here is what an engine left behind that ran on it. One of the
# bugs in this hunt comes from public code: in an adaptation of a ZeRO course (the repository
# xo-toybox/distributed-training-sandbox, 2025) a loop throws every gradient away, and no weight
# ever moves. The script prints bytes, and the bytes are right.
#
# Name the misconception with its letter, `lab.bug_hunt("3.3", "LETTER")`; then mend the code and
# hand it in. `number=2` to `number=5` are other bugs.

# %% hunt
lab.bug_hunt("3.3")

# %% [markdown] bridge-heading
# ## The same in PyTorch
#
# Two processes, gloo, torch's own `DistributedDataParallel`; then the engine on two ranks with the
# same model, data and optimizer. `Moved` stands between torch and gloo and counts the elements of
# the last step's collectives.

# %% torch-ddp
from torch.utils._python_dispatch import TorchDispatchMode


class Moved(TorchDispatchMode):
    """Count the elements that torch.distributed is asked to move, by operation."""

    def __init__(self):
        super().__init__()
        self.elements = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            numel = sum(tensor.numel() for tensor in args[0])
            self.elements[name] = self.elements.get(name, 0) + numel
        return func(*args, **(kwargs or {}))


def with_torch(steps=3):
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(gpt.GPT(shape), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    stream = data.batches(data.load_text(), comm.get_rank(), 2, 4, shape.seq_len, seed=0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with Moved() as moved:
            loss = model(*next(stream))
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, moved.elements


def with_ours(steps=3):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
    }
    engine, *_ = zerolab.initialize(model=gpt.GPT(shape), config=config)
    stream = data.batches(data.load_text(), comm.get_rank(), 2, 4, shape.seq_len, seed=0)
    losses = []
    for _ in range(steps):
        first = len(engine.records().collectives)
        loss = engine(*next(stream))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    events = [e for e in engine.records().collectives[first:] if e.purpose == "data"]
    return losses, {"all_reduce": sum(e.elements for e in events if e.op == "all_reduce")}


theirs = zerolab.run(with_torch, world_size=2, world="gloo", ledger=False)
ours = zerolab.run(with_ours, world_size=2, world="gloo", ledger=False)
for name, (losses, elements) in (("torch", theirs[0]), ("ours ", ours[0])):
    passes = {op: f"2 x {numel / psi:.3f} Psi" for op, numel in elements.items()}
    print(f"rank 0, {name}: {[f'{loss:.6f}' for loss in losses]}, moved {passes}")
pairs = [
    (a, b) for (t, _), (o, _) in zip(theirs, ours, strict=True) for a, b in zip(t, o, strict=True)
]
print(f"apart by at most {max(abs(a - b) for a, b in pairs):.1e}")

# %% [markdown] deepspeed
# Not a bit apart: a sum of two numbers has only one order, and from three ranks on there are more.
# And the same traffic: 2 Psi, an all-reduce counted twice.
#
# In DeepSpeed, and here:
#
# ```json
# {"train_batch_size": 64, "gradient_accumulation_steps": 2,
#  "zero_optimization": {"stage": 0, "overlap_comm": true, "reduce_bucket_size": 500000000},
#  "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
# ```
#
# Here the two keys of the third line decide what you have measured. DeepSpeed 0.19.8 does not read
# them at stage 0: it begins to all-reduce when the last backward of the step is over, in pieces of
# 5e8 elements, and overlaps nothing (`allreduce_gradients` in its `engine.py`).
#
# An article says that stage 0 "is not DeepSpeed's" but torch's DDP under another name. It is a
# setting of its own: DeepSpeed buckets and all-reduces in `engine.backward`, without torch's DDP.

# %% [markdown] text-heading
# ## What it has learned
#
# The model that goes with you through the course, after a few steps of your engine, and before.


# %% text
def write_text(steps):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    }
    engine, *_ = zerolab.initialize(model=gpt.GPT(shape), config=config)
    stream = data.batches(data.load_text(), comm.get_rank(), ranks, 8, shape.seq_len, seed=0)
    for _ in range(steps):
        engine.backward(engine(*next(stream)))
        engine.step()
    luck = torch.Generator().manual_seed(1)
    letters = gpt.generate(engine.module, data.encode(b"She was "), shape.seq_len, luck)
    with torch.no_grad():
        return data.decode([next(letters) for _ in range(60)]) if comm.get_rank() == 0 else ""


for steps in (0, 30):
    print(f"after {steps:>2} steps: {zerolab.run(write_text, ranks, args=(steps,))[0]!r}")

# %% [markdown] interview
# ## In the interview
#
# *"How does data parallel training keep its replicas equal, and what does it cost?"*
#
# **30 seconds.** All ranks start from rank 0's weights, each computes gradients on its own part of
# the batch, and an all-reduce averages them before every update; equal weights and equal gradients
# stay equal. It moves 2 Psi a step, 2 (N - 1)/N Psi a rank on a ring. Gradients are grouped into
# buckets in reverse order and sent from hooks while backward still runs, so most of it is hidden.
#
# **Two minutes.** Add: a collective has no name, so buckets leave in index order on every rank, not
# in order of completion. Small buckets start early and pay latency; large ones leave late, and the
# last is always exposed. An unused parameter never fires its hook: its bucket has to be flushed
# with zeros at the end of backward, or the other ranks hang. With accumulation, reduce only at the
# boundary (`no_sync`), or pay G times; and divide by G once. It averages because the loss is a mean
# over equal local batches; unequal ones need weights. BatchNorm still sees the local batch only.
# Memory: nothing is saved, 16 bytes a parameter on every rank.
#
# **Follow-ups.** With 1,024 ranks? With a micro-batch that is twice as large? What if ranks have
# unequal batches? Each is one cell:

# %% follow-up-ranks
for world_size in (2, 8, 1024):
    each = estimate.sent_bytes(2 * psi, world_size)
    hops = 2 * (world_size - 1)
    print(f"{world_size:>5} ranks: {each / psi:.3f} bytes a parameter, {hops:,} messages")

# %% follow-up-samples tags=nbval-check-output
for micro in (1, 2, 4):
    print(f"micro-batch {micro}: {2 * psi / (micro * 4):,.0f} elements a sample on 4 ranks")

# %% follow-up-unequal tags=nbval-check-output
x = torch.tensor([1.0, 2.0, 6.0])
w = torch.tensor(1.0, requires_grad=True)
whole = torch.autograd.grad((w * x).pow(2).mean(), w)[0]
parts = [torch.autograd.grad((w * part).pow(2).mean(), w)[0] for part in (x[:2], x[2:])]
print(f"whole batch {whole:.2f}; mean of the ranks {sum(parts) / 2:.2f}")
print(f"weighted by samples {(2 * parts[0] + 1 * parts[1]) / 3:.2f}")

# %% [markdown] quiz-heading
# ## Questions

# %% quiz
QuizCard(lab.quiz("03", part="chapter"))

# %% [markdown] summary
# ## Where you are
#
# | | |
# |---|---|
# | **data parallelism** | the same model, another part of the batch; gradients are averaged |
# | **2 Psi** | what a step moves, for any N; a rank sends (N - 1)/N of it |
# | **bucket** | gradients that travel together, filled from the last parameter on |
# | **index order** | the only thing that tells ranks which bucket they are talking about |
# | **flush** | what has not left when backward is over leaves then, with zeros |
# | **boundary** | where accumulated gradients are reduced: 2 Psi in place of 2 G Psi |
# | **batch equation** | total = micro x G x N |
#
# You wrote stage 0. Look at what every rank still holds: in `record` above, the optimizer's part is
# the largest, it is the same on all ranks, and all of them compute the same update from it. Must
# they? Chapter 04 asks.
