# %% [markdown] title
# # Gradient reduce-scatter
#
# **The question.** At stage 1 every rank holds all gradients and uses a slice of the mean. When can
# the rest go: after the step, after backward, or earlier? And is it free? The last measurement of
# this chapter answers, for one micro-batch a step and for four.
#
# *Estimated 125 minutes. You need chapters 00 to 04. You build stage 2: a bucket that dies as soon
# as it is reduced, and a predictor of how much that leaves at the worst moment.*

# %% begin
import torch

import zerolab
from zerolab import comm, gpt, lab
from zerolab.sim import estimate

lab.begin("05")
ranks = lab.world_size()
shape = gpt.preset("gpt-1m")
psi = gpt.num_params(shape)  # Psi, a count of parameters
print(f"{psi:,} parameters on {ranks} ranks")

# %% [markdown] recall-heading
# ## Before you begin
#
# Three questions from earlier chapters. What you can recall without looking stays with you.

# %% recall
lab.quiz("05", part="recall")

# %% [markdown] ceiling-heading
# ## The ceiling comes down
#
# Here is your engine of chapter 04 on GPUs that hold a little less than it wants. The card says how
# much of what filled the GPU was gradients.

# %% ceiling
one = lab.train(stage=1, model="gpt-10m")
ceiling = int(one.peak_bytes * 0.94)
lab.train(stage=1, model="gpt-10m", gpu_memory=ceiling)

# %% [markdown] notes
# ## Margin notes are for one pupil
#
# The pupils of chapter 04 divided the revision notebooks. During the lesson each still fills the
# margins of the *whole* textbook with notes on what to change, and at the end they add their notes
# up. But only one pupil will do the corrections of page 7. So as soon as page 7 has been read,
# everybody hands in the notes to it, the one who owns the page keeps the sum, and all others erase
# their margins and use them again.
#
# Backward reads from the last page to the first. So notes can be handed in while it reads on.

# %% [markdown] when-heading
# ## When are gradients in memory?
#
# The ledger knows, event by event: each allocation and each release is one. Here the last step of
# stage 1 is cut into ten stretches of equally many events, and of each you see the *most* MiB of
# gradients that were held in it. So no peak falls between two columns.

# %% when
from itertools import pairwise


def highest(run, kinds=("grad", "bucket"), stretches=10):
    """Return the most MiB of these kinds on rank 0 in each stretch of the last step."""
    held, levels, start, phase = 0, [], 0, ""
    for event in run.ranks[0].records.memory:
        if event.phase == "forward" != phase:
            start = len(levels)  # a step begins here
        phase = event.phase
        held += event.delta if event.kind in kinds else 0
        levels.append(held)
    step = levels[start:]
    edges = [i * len(step) // stretches for i in range(stretches + 1)]
    return [max(step[a:b]) / 2**20 for a, b in pairwise(edges)]


def show(run):
    row = highest(run)
    words = "  ".join(f"{level:5.2f}" for level in row)
    print(f"stage {run.job.stage}: {words}   MiB, at most {max(row):.2f}")


show(one)
print(f"all gradients of the model: {2 * gpt.num_params(gpt.preset('gpt-10m')) / 2**20:.2f} MiB")

# %% [markdown] when-why
# They grow with backward until all of them are there, wait as a whole, and go when the optimizer
# has used them. Freed after the step or after backward: the highest point would be the same. A
# "stage 2" that reduces when backward is over saves nothing where it counts.

# %% [markdown] blank-heading
# ## An empty page
#
# So it has to happen inside backward. Two layers, torch and `comm`, at most forty lines;
# accumulation included. The contract stands in the docstring. The check trains two layers for the
# values, and twelve for the peak.
#
# `param.register_post_accumulate_grad_hook(function)` calls `function(param)` when the gradient of
# `param` is complete. *About 25 minutes, difficulty 3 of 4;* `lab.hint("5.1")` helps in three
# steps.

# %% exercise zerolab.two_layers.gradient_sharding:train_sharded_gradients
lab.check("5.1", train_sharded_gradients)

# %% [markdown] hunt-heading
# ## Find the bug
#
# Here is what somebody's page left behind. Four of the five bugs in this hunt stood in public
# code. In Tiny-DeepSpeed gradients were added up over ranks and never divided. In picotron's naive
# data parallelism a hook changed something that was not the gradient, so that nothing was ever
# averaged. In an adaptation of a ZeRO course (xo-toybox/distributed-training-sandbox, 2025) N
# copies of a gradient were sent, end to end, where one was meant: right values, N times the
# traffic. And DeepSpeed itself, with the optimizer on the host, lost the gradients of all
# backwards of a step but the last (pull request 7981, merged in 2026). The fifth is the opposite of
# that.
#
# Name the misconception with its letter, `lab.bug_hunt("5.1", "LETTER")`; then mend the code and
# hand it in. `number=2` to `number=5` are the others.

# %% hunt
lab.bug_hunt("5.1")

# %% [markdown] keep-heading
# ## A slice is a window
#
# The engine has buckets in place of single parameters, so most gradients travel together. First the
# way that DeepSpeed takes by default: all-reduce the bucket, then keep the own slice. What does it
# cost to keep a tenth of something?

# %% window
gpu = zerolab.VirtualGPU()
with gpu:
    for way in ("slice", "contiguous", "clone"):
        whole = torch.zeros(1_000_000)
        part = whole[:100_000]
        part = {"slice": part, "contiguous": part.contiguous(), "clone": part.clone()}[way]
        del whole
        print(f"{way:10} {part.nbytes:>9,} bytes in the tensor, {gpu.allocated_bytes:>9,} held")
        del part

# %% [markdown] your-turn-keep
# ## Your turn: keep the own slice
#
# Memory is freed with the last tensor that looks into it. `kind_of_mean(bucket)` says how the
# ledger is to count what you keep: as a gradient that stays, or as something on its way that will
# be added to a gradient that is there. *About 6 minutes, difficulty 1;* `lab.hint("5.2")` helps.

# %% exercise zerolab.zero2:keep_own_slice
lab.check("5.2", keep_own_slice)

# %% [markdown] your-turn-stage
# ## Your turn: the stage
#
# Stage 1 wrote the mean over the own slice of the full gradients: no memory beside it, and so the
# full buffer had to stay. Stage 2 turns that around. The mean goes into a new tensor of one slice,
# and nobody but the collective holds the full buffer: it dies when the collective has ended.
#
# Two methods. `reduce` starts the reduction of `self.outgoing(bucket)` and sets `bucket.incoming`
# (where the mean will be, counted as `kind_of_mean(bucket)`) and `bucket.work`. `receive` is called
# later and must leave the mean in `bucket.reduced`, added to what earlier micro-steps left:
# `reducing.receive(bucket, dtype)` of chapter 03 waits for `bucket.work` and does that, where
# `dtype` is `self.grad_dtype(bucket)`. *About 20 minutes, difficulty 3;* `lab.hint("5.3")` helps.

# %% exercise zerolab.zero2:Zero2
lab.check("5.3", Zero2)

# %% [markdown] fits-heading
# ## The run that did not fit

# %% fits
run = lab.train(stage=2, model="gpt-10m", gpu_memory=ceiling)
run

# %% whose
from zerolab_widgets import EngineMap

EngineMap(lab.engine_map(stage=2))

# %% curves
for trained in (one, run):
    show(trained)

# %% [markdown] peak-heading
# ## Your turn: predict the worst moment
#
# What is left at the highest point are the slices, and the buckets that are being filled or on
# their way. How many is that? Write the predictor that `zerolab estimate` uses. It plays one
# backward: one gradient after the other comes, and belongs to a bucket. *About 20 minutes,
# difficulty 3;* `lab.hint("5.4")` helps.

# %% exercise zerolab.sim.temporaries:bucket_peak_numel
lab.check("5.4", bucket_peak_numel)

# %% [markdown] bucket-size-heading
# ## More memory than stage 1?
#
# On your predictor: the bytes of gradients and buckets of one rank, for buckets of several sizes.


# %% bucket-sizes
def gradients_of(stage, bucket_numel, world_size):
    sizes = estimate.layout(gpt.GPT(shape), bucket_numel, world_size)
    arrivals = estimate.gpt_arrivals(sizes)
    slices = estimate.state_bytes(stage, "bf16", sizes)["grad"]
    return slices + estimate.bucket_peak_bytes(stage, sizes, "bf16", arrivals)


for bucket_numel in (20_000, 100_000, 1_000_000):
    share = gradients_of(2, bucket_numel, ranks) / gradients_of(1, bucket_numel, ranks)
    print(f"buckets of {bucket_numel:>9,} elements: {share:.0%} of stage 1")

# %% [markdown] bucket-size
# The smaller the buckets, the less is on its way. DeepSpeed's `reduce_bucket_size` is 5e8
# *elements* by default, and its buffer has that length whatever the model: 1 GB in 16 bits, two of
# them with `overlap_comm`. It is made when backward begins, while the activations are still there.
# So people saw stage 2 peak *above* stage 1 and asked why (DeepSpeed issue 1302; DeepSpeedExamples
# issue 336 has a maintainer's answer). In 0.19.8 stage 1 makes the same buffer. Here a bucket is as
# long as what is in it.

# %% [markdown] predict-heading
# ## Predict, then measure

# %% predict-peak
lab.predict("5.6", None)

# %% [markdown] passes-heading
# ## Your turn: what accumulation costs
#
# Three sentences that people learn for interviews. "Gradient accumulation lowers the number of
# synchronisations." "At stage 2 gradients are accumulated locally." "ZeRO-2 lowers the volume of
# gradient synchronisation." With the right number of passes none of them stays as it is. How often
# do the *reductions* of a step move the model? *About 8 minutes, difficulty 2.*

# %% exercise zerolab.sim.traffic:reduction_passes
lab.check("5.5", reduction_passes)

# %% passes-table
print("micro-steps" + "".join(f"{count:>6}" for count in (1, 2, 4, 8)))
for stage in (0, 1, 2, 3):
    row = "".join(f"{estimate.elements_moved(stage, 1, count):>6}" for count in (1, 2, 4, 8))
    print(f"stage {stage}    {row}  Psi")

# %% predict-passes
lab.predict("5.7", None)

# %% [markdown] local-heading
# ## Local, and yet sharded?
#
# Local accumulation needs room for all local gradients, and that is what stage 2 gave away. So
# every micro-step reduces to the owner, and the *owner* accumulates its slice. Both schedules can
# be asked for at stage 1; look at what each one holds and moves with four micro-steps.

# %% schedules
from zerolab.lab.chapters import stage_runs

for stage, reduce in ((1, "boundary"), (1, "micro_step"), (2, "micro_step")):
    plan = stage_runs.Plan(stage, ranks, accum_steps=4, reduce=reduce, deep=True)
    shown = stage_runs.run(plan)[0]
    numel = stage_runs.padded(ranks, deep=True)
    most = shown.most.get("grad", 0) + shown.most.get("bucket", 0)
    print(
        f"stage {stage}, {reduce:10}: {sum(shown.moved().values()) / numel:.0f} Psi, "
        f"gradients when ready {shown.ready['grad']:>5}, at the peaks {most:>5} bytes"
    )

# %% [markdown] schedules-why
# The middle row pays twice: for the traffic of stage 2 and for the memory of stage 1. And stage 1
# with the usual schedule is often the better choice for many micro-steps: it moves 2 Psi, whatever
# their number. This is why pipelines, which have many micro-batches, are used with stage 1.

# %% [markdown] compare-heading
# ## Side by side

# %% compare
lab.compare(one, run)

# %% [markdown] order-heading
# ## While backward runs
#
# On the ledger of a small run, in order: a bucket appears with its first gradient, it is sent when
# it has all of them and its turn has come, it goes. The first one to appear is the last one to be
# sent. Why?

# %% order
small = lab.train(stage=2, model="gpt-1m", steps=1)
records = small.ranks[0].records
facts = [(e.time, f"sent     {e.label}") for e in records.collectives if e.op == "reduce_scatter"]
for event in records.memory:
    if event.kind == "bucket":
        word = "appears: " if event.delta > 0 else "    goes:"
        facts.append((event.time, f"{word} {abs(event.delta) / 2**10:.0f} KiB"))
for _, what in sorted(facts):
    print(what)

# %% [markdown] timeline-heading
# The root's bucket holds the last norm, whose gradient is the very first, and the embedding, whose
# gradient is the very last. The same as lanes, a rank each: when it computed, what was on its way,
# when it waited.

# %% timeline
from zerolab_widgets import StepTimeline

StepTimeline(small)

# %% [markdown] trace-heading
# ## One step, call by call

# %% trace
lab.trace(stage=2, depth=1)

# %% [markdown] diff-heading
# ## The stage as a difference

# %% diff tags=nbval-check-output
from zerolab import zero1, zero2

for name in ("owned_shards", "reduce", "receive", "publish"):
    home = next(c for c in zero2.Zero2.__mro__ if name in vars(c))
    print(f"{name:13} is stage {home.stage}'s")
print(
    "buckets count as", zero1.Zero1.fresh_kind, "at stage 1,", zero2.Zero2.fresh_kind, "at stage 2"
)

# %% [markdown] break-heading
# ## Break one line
#
# `receive` waits for the collective. The last rank is in a hurry and does not. Which ranks will be
# wrong, and from when on? Decide before you run the cell.

# %% break
Mine = lab.running("zerolab.zero2:Zero2")


class Hasty(Mine):
    def receive(self, bucket):
        if comm.get_rank() != comm.get_world_size() - 1:
            return super().receive(bucket)
        vars(self).setdefault("unfinished", []).append(bucket.work)
        bucket.reduced, bucket.work = bucket.incoming.clone(), None
        bucket.state = type(bucket.state).REDUCED


with lab.plugged("zerolab.zero2:Zero2", Hasty):
    broken = lab.train(stage=2, model="gpt-nano", steps=3)
broken

# %% [markdown] broken
# One hasty rank is enough to ruin all of them. In the lockstep world what nobody waited for is NaN;
# the check before the step sees it, and *all* ranks skip the step, every time: the weights stand
# still, and the losses differ by their batches alone. On real hardware there may be old numbers in
# that memory, or by luck the right ones. Then nothing is skipped, and the garbage of one slice goes
# to everybody with the next all-gather.

# %% [markdown] bridge-heading
# ## The same in PyTorch: FSDP2
#
# FSDP2 is torch's fully sharded data parallelism, its stages 2 and 3. `fully_shard` with
# `reshard_after_forward=False` keeps the gathered parameters from forward to backward,
# reduce-scatters each block's gradients in backward and frees them: the traffic of stage 2, one
# gather and one reduce-scatter a step. (Between two steps its parameters are sharded as well;
# chapter 06.) Two processes, gloo, real torch code.


# %% fsdp
def with_fsdp(steps=3):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                counts[func._opname] = counts.get(func._opname, 0) + 1
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = gpt.GPT(small_shape)
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(steps):
        counts = {}
        with Calls():
            loss = model(*batch(step))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, counts


def batch(step):
    from zerolab import data

    stream = data.batches(data.load_text(), comm.get_rank(), 2, 4, small_shape.seq_len, seed=step)
    return next(stream)


small_shape = gpt.preset("gpt-nano")
theirs = zerolab.run(with_fsdp, world_size=2, world="gloo", ledger=False)
print("losses of rank 0:", [f"{loss:.6f}" for loss in theirs[0][0]])
print("calls of a step: ", theirs[0][1])


# %% ours-on-gloo
def with_ours(steps=3):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
    }
    engine, *_ = zerolab.initialize(model=gpt.GPT(small_shape), config=config)
    losses = []
    for step in range(steps):
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


ours = zerolab.run(with_ours, world_size=2, world="gloo", ledger=False)
print("losses of rank 0:", [f"{loss:.6f}" for loss in ours[0]])
pairs = [(a, b) for (t, _), o in zip(theirs, ours, strict=True) for a, b in zip(t, o, strict=True)]
print(f"apart by at most {max(abs(a - b) for a, b in pairs):.1e}")

# %% [markdown] deepspeed-heading
# ## In DeepSpeed
#
# ```json
# {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
#  "zero_optimization": {"stage": 2, "reduce_scatter": true, "reduce_bucket_size": 50000000,
#                        "overlap_comm": true, "contiguous_gradients": true},
#  "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
# ```
#
# Three surprises. DeepSpeed 0.19 never calls a reduce-scatter here: it all-reduces the bucket and
# copies the owned slices out, or reduces to each owner with another option. So a profile shows
# `all_reduce`, and a step of one micro-batch moves 3 Psi; with the four of this file it is 2 Psi
# for each, and the gather. Older articles name a function `create_reduce_and_remove_grad_hooks`,
# which at stages 1 and 2 has another name since. And one article counts activation checkpointing
# and defragmentation into "ZeRO-2": the *release* of that name brought them, the key `stage: 2`
# shards gradients and nothing else. Your engine can reduce in both ways, and counts:

# %% deepspeed-traffic
for reduce_scatter in (True, False):
    plan = stage_runs.Plan(2, ranks, accum_steps=4, reduce_scatter=reduce_scatter)
    moved = stage_runs.run(plan)[0].moved()
    passes = sum(n * (2 if op == "all_reduce" else 1) for op, n in moved.items())
    print(f"reduce_scatter={reduce_scatter}: {moved}, {passes / stage_runs.padded(ranks):.0f} Psi")

# %% [markdown] gloo-heading
# ## On gloo
#
# One more place where a name is not a thing: gloo's own reduce-scatter is an all-reduce inside, and
# sends twice the bytes. On CPUs `comm.reduce_scatter` therefore exchanges slices directly and adds
# them up in rank order. If you measure stage 2 with another library on gloo, you measure that.

# %% [markdown] sample-heading
# ## What it writes
#
# The model of this course on your stage 2, with two micro-steps a step. After so few steps expect
# letters and spaces, in about the right number.


# %% sample
def write(steps, numel):
    from itertools import islice

    from zerolab import data
    from zerolab.lab.evidence import home

    torch.manual_seed(0)
    small = gpt.preset("gpt-nano")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    }
    trainer, *_ = zerolab.initialize(model=gpt.GPT(small).to(home()), config=config)
    stream = data.batches(data.load_text(), comm.get_rank(), ranks, 4, small.seq_len, seed=0)
    for tokens, targets in islice(stream, 2 * steps):
        trainer.backward(trainer(tokens.to(home()), targets.to(home())))
        trainer.step()
    luck = torch.Generator(home()).manual_seed(1)
    prompt = data.encode("The ").to(home())
    return data.decode(list(islice(gpt.generate(trainer, prompt, small.seq_len, luck), numel)))


print("after 30 steps of stage 2: The " + zerolab.run(write, ranks, args=(30, 60), ledger=False)[0])

# %% [markdown] record-heading
# ## Beside the formula
#
# Your record: bytes, calls, and the closed form, as in chapter 04.

# %% record
two = lab.train(stage=2, model="gpt-1m")
sizes = estimate.layout(gpt.GPT(shape), estimate.BUCKET_NUMEL, ranks)
formula = estimate.state_bytes(2, "bf16", sizes)
print("held    ", {kind: f"{size:,}" for kind, size in two.ranks[0].state_bytes.items()})
print("formula ", {kind: f"{size:,}" for kind, size in formula.items()})
calls = [event for event in two.ranks[0].records.collectives if event.purpose == "data"]
step = calls[-2 * len(sizes.trained) :]
print(f"at the peak {two.peak_bytes / 2**20:.2f} MiB; {len(step)} collectives in the last step")

# %% [markdown] answer-heading
# ## The answer
#
# When can the rest of the gradients go? In the middle of backward, bucket by bucket. Is it free?
# For one micro-batch.

# %% answer
for accum_steps in (1, 4):
    for stage in (1, 2):
        shown = stage_runs.run(stage_runs.Plan(stage, ranks, accum_steps=accum_steps, deep=True))[0]
        passes = sum(shown.moved().values()) / stage_runs.padded(ranks, deep=True)
        held = f"{shown.ready['grad']:>4} bytes of gradients when they are ready"
        print(f"micro-batches {accum_steps}, stage {stage}: {passes:.0f} Psi moved, {held}")
for trained in (one, run):
    most = f"{max(highest(trained)):.2f} MiB of gradients and buckets"
    print(f"gpt-10m, stage {trained.job.stage}: at the worst moment of a step {most}")

# %% [markdown] interview
# ## In the interview
#
# *"What does ZeRO stage 2 add to stage 1, and when would you not use it?"*
#
# **30 seconds.** It shards gradients: each bucket is reduce-scattered while backward runs, the
# owner keeps its slice of the mean, the rest is freed. 14 of 16 bytes are divided then. Traffic is
# 2 Psi, as at stages 0 and 1, with one micro-batch. With G micro-batches it reduces G times, (G +
# 1) Psi, so for many micro-batches stage 1 moves less.
#
# **Two minutes.** Hooks on parameters fill buckets, in the reverse order of the model; a complete
# bucket leaves at once, and strictly in index order. It must happen in backward: after it the peak
# has been. At the worst moment there are the slices, one bucket on its way and one being filled,
# and those with an early gradient; so the bucket size is the price, and DeepSpeed's fixed 5e8
# elements can cost more than they save. What is saved over stage 1 is 2 (1 - 1/N) bytes a
# parameter. Accumulation happens in the owner's slice, in each micro-step. Reducing only at the
# boundary would bring the whole gradients back: DeepSpeed refuses `no_sync` from stage 2 on, FSDP2
# allows it (`set_requires_gradient_sync(False)`) at that price. In DeepSpeed the call is an
# all-reduce by default, (2 G + 1) Psi; FSDP2 with `reshard_after_forward=False` is the nearest in
# torch. With pipelines stage 1 is usual, since there are many micro-batches.
#
# **Follow-ups.** "How much is saved on 8 ranks for 7B? Is it half, as people say?" "And with 8
# micro-batches, what is moved?" "When are buckets larger than what they save?" Each is settled by
# a cell:

# %% follow-up-saving
seven = 7 * 10**9
saved = estimate.model_state_bytes(seven, 8, 1) - estimate.model_state_bytes(seven, 8, 2)
print(f"7B on 8 ranks: {saved / 1e9:.2f} GB a rank less than at stage 1")
for n in (4, 8, 64):
    ratio = estimate.saving_factor(2, n) / estimate.saving_factor(1, n)
    print(f"{n} ranks: states {ratio:.2f} times smaller than at stage 1")

# %% follow-up-accumulation
stages = {stage: estimate.elements_moved(stage, 1, accum_steps=8) for stage in (0, 1, 2, 3)}
print("8 micro-batches, in Psi:", stages)

# %% follow-up-buckets
fixed = 2 * 2 * 5 * 10**8  # bytes: two buffers of 5e8 elements, in 16 bits
for millions in (125, 1_300, 7_000):
    saves = 2 * millions * 10**6 * (1 - 1 / 8)
    print(f"{millions:>5}M: saves {saves / 1e9:5.2f} GB, fixed buckets {fixed / 1e9:.2f} GB")

# %% [markdown] from-memory
# ## From memory, against the clock
#
# The ring's all-gather of chapter 02, in 8 minutes, without looking; `exchange(outgoing, incoming)`
# is there. Say aloud how much each rank sends and in how many messages. Run the next cell when you
# begin. The check is the one of chapter 02.

# %% clock
import time

began = time.monotonic()

# %% exercise zerolab.comm.ring:all_gather
lab.check("2.5", all_gather)
print(f"{(time.monotonic() - began) / 60:.1f} of 8 minutes")

# %% [markdown] quiz-heading
# ## Questions

# %% quiz
lab.quiz("05", part="chapter")

# %% [markdown] summary
# ## Where you are
#
# | | |
# |---|---|
# | **stage 2** | 14 of 16 bytes divided by N; parameters whole |
# | **when** | inside backward, bucket by bucket; afterwards the peak has been |
# | **peak** | slices, two buckets, and those with an early gradient |
# | **traffic** | 2 Psi; with G micro-steps (G + 1) Psi, where stage 1 stays at 2 |
# | **a slice is a window** | `clone()` it, or the whole buffer stays |
# | **accumulation** | the owner's slice adds up; the full gradients never wait |
#
# Two bytes a parameter are left whole: the parameters themselves. Forward uses one block after the
# other, and at every moment all blocks but one lie idle on every rank. Chapter 06 fetches a block
# when it is needed and forgets it afterwards. What will that cost, and what breaks if a block is
# needed twice?
