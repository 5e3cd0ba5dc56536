# %% [markdown] title
# # Parameter all-gather
#
# **The question.** Stage 2 left one thing whole on every rank: the parameters, 2 of 16 bytes. Stage
# 3 cuts them as well, although every rank needs all of them in every step. When is which part of
# the model whole, how much memory is that at most, and what does it cost on the wire? The last
# measurement of this chapter answers.
#
# *Estimated 165 minutes. You need chapters 00 to 05. You build stage 3: what takes a unit's memory
# away and brings it back, who is gathered together and who next, and the moments of the stage.*

# %% begin
import inspect
import json
import subprocess
import sys

import torch

import zerolab
from zerolab import comm, device, gpt, lab
from zerolab.sim import estimate, states
from zerolab_widgets import MemoryBars

lab.begin("06")
ranks = lab.world_size()
shape = gpt.preset("gpt-1m")
psi = gpt.num_params(shape)  # Psi, a count of parameters
print(f"{psi:,} parameters on {ranks} ranks")

# %% [markdown] recall-heading
# ## Before you begin
#
# Three questions from earlier chapters. What you can recall without looking stays with you.

# %% recall
lab.quiz("06", part="recall")

# %% [markdown] ceiling-heading
# ## The ceiling comes down
#
# Your engine of chapter 05, gradient sharding, on GPUs that hold a little less than it wants.

# %% ceiling
free = lab.train(stage=2, model="gpt-1m")
ceiling = int(free.peak_bytes * 0.96)
lab.train(stage=2, model="gpt-1m", gpu_memory=ceiling)

# %% what-is-whole
for stage in (2, 3):
    each = states.model_states(psi, ranks, stage)
    print(f"stage {stage}:", {kind: f"{size / 2**20:.2f} MiB" for kind, size in each.items()})

# %% [markdown] textbook
# ## Four pupils, one textbook
#
# Margin notes, clean copies and revision notebooks are divided by now. What every pupil still
# carries is the textbook. They divide it too: each keeps a quarter of *every chapter*. When the
# lesson comes to chapter 3, everybody reads out their quarter of it, all write it down, work with
# it, and wipe the board. Then chapter 4. On the way back (backward) the same once more, from the
# last chapter to the first.
#
# Two things follow, and you can hold on to them through all of this notebook:
#
# - Nobody ever has more on the board than the chapter at hand, and perhaps the next one.
# - Each chapter is read out twice a lesson.
#
# And one thing does not follow: the work is not divided. Every pupil works through every chapter,
# on exercises of their own. Stage 3 is data parallelism; it divides what is *kept*.

# %% [markdown] blank-heading
# ## An empty page
#
# Build the idea before the engine's version of it: a few layers, torch and `comm`, at most forty
# lines. The contract stands in the docstring. You may use `comm.get_rank()`,
# `comm.get_world_size()`, `comm.all_gather(output, input)`, and
# `comm.reduce_scatter(output, input, "avg")`.
#
# The hard part is backward. Autograd saves what it needs in forward, and it needs the weights. If
# you free them it has nothing; if you do not, nothing is sharded. One way out: do not let it save
# anything, and run each layer a second time when its gradients are wanted. *About 30 minutes,
# difficulty 3 of 4;* `lab.hint("6.1")` helps in three steps.

# %% exercise zerolab.two_layers.parameter_sharding:train_sharded_params
lab.check("6.1", train_sharded_params)

# %% [markdown] second-forward
# Correct, and wasteful: every layer runs forward twice. The engine does not do that. It lets
# autograd save the weights in forward, takes *the memory behind them* away, and puts it back before
# backward. The next two functions are that trick.

# %% [markdown] trick-heading
# ## A tensor without memory
#
# A tensor is a description (shape, strides, offset) of a *storage*, and the storage holds the
# bytes. `del weight` drops a description; while somebody else has another one, the bytes stay.
# Autograd has one. `storage.resize_(0)` takes the bytes themselves.


# %% storage
def bytes_after(action):
    """Multiply with a weight of 256 KiB, then try to free it; return the bytes that are held."""
    inputs = torch.ones(4, 256, requires_grad=True)
    buffer = torch.ones(256 * 256)
    weight = buffer.view(256, 256)
    out = inputs @ weight  # autograd saves the weight for backward
    if action == "del":
        del weight, buffer
    elif action == "resize_(0)":
        buffer.untyped_storage().resize_(0)
    return device.current().allocated_bytes, out.shape


for action in ("nothing", "del", "resize_(0)"):
    held, _ = zerolab.run(bytes_after, 1, world="lockstep", args=(action,))[0]
    print(f"after {action:10} {held / 2**10:.0f} KiB")

# %% [markdown] nan-heading
# ## Why a NaN
#
# After `resize_(0)` the parameters still claim a shape, with nothing behind it. `param.norm()`
# then reads memory that is not there, and the process ends with a segmentation fault: no traceback,
# no line. That is what a learner meets first when writing a stage 3, usually in a print.
#
# DeepSpeed gives such parameters the size 0. Then the model can be printed, but its shapes are
# gone, and people ask why `numel()` is 0 (DeepSpeed issue 4064). Here a
# sharded parameter keeps its shape and holds one number, NaN, expanded to that shape. It costs a
# few bytes for the whole model, and whoever computes with it by mistake sees NaN. The engine
# refuses such reads before, by the parameter's name: the NaN is for what slips past it.

# %% expanded tags=nbval-check-output
nothing = torch.tensor(torch.nan).expand(1000, 1000)
print(tuple(nothing.shape), nothing.untyped_storage().nbytes(), "bytes;", "norm:", nothing.norm())

# %% [markdown] your-turn-unshard
# ## Your turn: bring it back
#
# A bucket has `flat_param` `[padded_numel]`, whose storage is empty, and `shard` `[shard_numel]`,
# this rank's slice. Give the memory back (`resize_` counts bytes) and start the gather, by
# `comm.all_gather(output, input, async_op=True, label=bucket.name)`. Who needs the result will
# wait. *About 5 minutes, difficulty 1.*

# %% exercise zerolab.turns:unshard_bucket
lab.check("6.2", unshard_bucket)

# %% [markdown] your-turn-reshard
# ## Your turn: take it away
#
# The parameters first, then the memory. `bucket.slots` lists the parameters (`slot.param`);
# `sharded_param.placeholder(param)` is the NaN in a parameter's shape. *About 6 minutes, difficulty
# 2;* `lab.hint("6.3")` helps.

# %% exercise zerolab.turns:reshard_bucket
lab.check("6.3", reshard_bucket)

# %% [markdown] ledger-heading
# ## What a mistake looks like
#
# Somebody reads a parameter outside forward: the engine refuses, names it, and says what to do.
# Somebody reaches the buffer itself, as a library might that kept a reference: the virtual GPU
# refuses before the kernel runs, and says which unit it was.


# %% mistakes
def tiny_engine(model="gpt-nano", **more):
    """Return an engine at stage 3, in fp32."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3} | more,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    return zerolab.initialize(model=gpt.GPT(gpt.preset(model)), config=config)[0]


def two_mistakes():
    engine = tiny_engine()
    bias = engine.module.blocks[1].mlp.widen.bias
    buffer = engine.sharding.units[2].buckets[0].flat_param
    said = []
    for tensor in (bias, buffer):
        try:
            tensor.sum()
        except (zerolab.UsageError, RuntimeError) as error:
            said.append(str(error))
    return said


for line in zerolab.run(two_mistakes, ranks, world="lockstep")[0]:
    print(line)

# %% [markdown] units-heading
# ## Who is gathered together
#
# What appears and goes as one is a *unit*. The choice is a trade:
#
# | unit | at most whole | gathers a step |
# |---|---|---|
# | the whole model | everything: stage 3 in name only | 2 |
# | every parameter | one parameter | hundreds, each too small for the network |
# | a block | a block or two | 2 a block |
#
# A block of a transformer is the natural one: large enough for the network, and everything in it is
# used together. What is in no block (embeddings, the last norm, the head) forms the *root* unit. It
# is whole from the start of the model's forward to its end, and again through backward.

# %% [markdown] your-turn-units
# ## Your turn: which parameter belongs to whom
#
# Blocks are given as pairs (name, module), none inside another. Each parameter goes to one unit.
# The interesting case is a weight that two blocks share: in either block's unit it would be gone
# when the other needs it, in both it would be trained twice. It goes to the root, which is there
# all the time.
#
# Return `(name, module, [(parameter's name, parameter), ...])` for each unit: the root first, named
# "root", whose module is the model, then the blocks as given. *About 12 minutes, difficulty 2;*
# `lab.hint("6.4")` helps.

# %% exercise zerolab.bucket:assign_params
lab.check("6.4", assign_params)

# %% unit-table
from zerolab import bucket as buckets

model = gpt.GPT(shape)
for name, _, params in buckets.assign_params(model, buckets.find_blocks(model)):
    print(f"{name:9} {sum(p.numel() for _, p in params):>8,} elements in {len(params)} parameters")
print("head is the embedding:", model.head.weight is model.token_embedding.weight)

# %% [markdown] tied-note
# The head and the embedding are one tensor here. The root holds it once: it is gathered with the
# root, used at both ends, its gradient is the sum of both uses, and it is updated once.

# %% [markdown] turn-heading
# ## One unit's turn
#
# | state | memory | parameters | next |
# |---|---|---|---|
# | SHARDED | own slice only | NaN | `fetch` |
# | IN_FLIGHT | there, being filled | NaN | `unshard` waits |
# | UNSHARDED | there | views of the buffer | `reshard` |
#
# There are three states and not two because of what chapter 03 did with gradients: a collective
# runs while something else computes. `fetch` for the unit after this one, then compute, then
# `unshard`, which finds the work nearly done.

# %% [markdown] your-turn-turn
# ## Your turn: the three ways between states
#
# The first *moment*. Every unit of the engine gets an object of this class. Mind the calls that
# come in an odd state: `fetch` of a unit that is on its way, `unshard` of one that nobody fetched,
# `reshard` of one that was fetched and never used. Your `unshard_bucket` and `reshard_bucket` are
# there. *About 20 minutes, difficulty 2;* `lab.hint("6.5")` helps.

# %% exercise zerolab.turns:Turn.fetch, Turn.unshard, Turn.reshard
lab.check("6.5", Turn)

# %% [markdown] ahead-heading
# ## Who comes next?
#
# The engine does not know your model's forward. It remembers: after this unit, last time, that one
# had its turn. So the first step gathers nothing ahead, and a model that takes another way than
# last time gathers something for nothing, which is freed and does no harm. Backward has a row of
# its own, since it goes the other way.
#
# How far ahead? One unit hides one gather behind one block's computation. DeepSpeed's key
# `stage3_prefetch_bucket_size` is a limit in elements: as many units as fit together;
# `unit_numel(unit)` counts them. *About 10 minutes, difficulty 2;* `lab.hint("6.6")` helps.

# %% exercise zerolab.turns:units_ahead
lab.check("6.6", units_ahead)

# %% [markdown] moments-heading
# ## Your turn: the stage
#
# Everything is there; what is missing is *when*. The hooks that notice a unit's forward and the
# gradients that enter and leave it are inherited, and call these methods. A difficult question is
# answered for you in two methods: `needed_again(unit)` after forward (is it borrowed, is backward
# recomputing it?), and `done_with(unit)` in backward (are all gradients of its parameters *and* of
# its inputs there?). Why the inputs: a layer's gradient for its input is made from its weights.
#
# *About 25 minutes, difficulty 3;* `lab.hint("6.7")` helps.

# %% exercise zerolab.zero3:Zero3
lab.check("6.7", Zero3)

# %% [markdown] fits-heading
# ## The run that did not fit
#
# The same ceiling, and the engine is yours.

# %% fits
run = lab.train(stage=3, model="gpt-1m", gpu_memory=ceiling, watch=MemoryBars())
run

# %% [markdown] predict-heading
# ## Predict, then measure
#
# Put a number in the place of `None`, in each of the two cells. Nothing is measured before.

# %% predict-gathered
lab.predict("6.8", None)

# %% predict-passes
lab.predict("6.9", None)

# %% [markdown] story-heading
# ## One step, told by the memory
#
# `+` a unit's memory appears and its gather starts; `-` it goes. Read the last step of rank 0 and
# find: the two times that each unit comes; the one that comes while another computes; the one that
# stays from the first block to the last, and once more on the way back.

# %% story
import textwrap

from zerolab.lab.chapters.unit_runs import Story

told = Story.of(run.ranks[0].records)
last_step = told.events[-len(told.events) // len(run.losses) :]
print(textwrap.fill(" ".join(last_step), 96))

# %% lifecycle
from zerolab_widgets import UnitLifecycle

UnitLifecycle(run)

# %% [markdown] peak-heading
# ## What peaks when
#
# Whole parameters are a hill that does not grow with the number of blocks: root, the block that
# computes, the one on its way. The formula is one line, and your engine matches it to the byte.

# %% peak
sizes = estimate.layout(gpt.GPT(shape), estimate.BUCKET_NUMEL, ranks)
formula = estimate.gathered_peak_bytes(3, sizes, "bf16")
print(f"whole parameters, at most: {told.most:,} bytes; formula {formula:,}")
print(f"all parameters in bf16:    {2 * sizes.padded_numel:,} bytes")
held = run.ranks[0].state_bytes
for name, each in (("shards", held), ("formula", estimate.state_bytes(3, "bf16", sizes))):
    print(f"{name:8}", {kind: f"{size:,}" for kind, size in each.items()})

# %% [markdown] peak-kinds
# And each kind by itself: the most there ever was of it, the phase in which it was first that much,
# and what there is of it at the peak of all kinds together.

# %% peaks
held, most, peak = {}, {}, (0, "", {})
for event in run.ranks[0].records.memory:
    held[event.kind] = held.get(event.kind, 0) + event.delta
    if held[event.kind] > most.get(event.kind, (0, ""))[0]:
        most[event.kind] = held[event.kind], event.phase
    if sum(held.values()) > peak[0]:
        peak = sum(held.values()), event.phase, dict(held)
for kind in ("param", "master", "optimizer", "gathered", "activation", "bucket", "grad"):
    size, phase = most[kind]
    now = peak[2].get(kind, 0) / 2**20
    print(f"{kind:10} most {size / 2**20:4.2f} MiB, in {phase:8}   at the peak {now:4.2f} MiB")
print(f"all kinds  most {peak[0] / 2**20:4.2f} MiB, in {peak[1]}")

# %% [markdown] peak-why
# (`param` was most before anything was sharded: the engine was given a whole model in fp32. The
# cell `init`, further down, builds it in shards.) Read the others as a calendar of the step:
#
# | when | what is at its highest |
# |---|---|
# | always | the shards; Adam's averages from the first update on |
# | forward and backward | gathered parameters: root, the block at hand, the next one |
# | the end of forward | activations |
# | early in backward | **all together**: activations, gathered parameters, the first buckets |
# | later in backward | buckets: the root's, one that is being filled, one on its way |
# | the end of backward | slices of gradients |
#
# (The root's bucket waits for the embedding's gradient, the last of all.) So the rule to remember
# is *16 Psi / N, and the root, a block and its neighbour, once as parameters and once as gradients,
# and activations*; and not all of it at the same moment.
#
# Three sentences from articles, settled by these numbers. "A GPU holds exactly 1/N of the
# parameters": between steps, yes. "Any model size in theory": the largest unit must fit, whole,
# with its gradients and activations. "On a single GPU use stage 3": with N = 1 nothing is divided,
# and without offload nothing is saved.

# %% [markdown] traffic-heading
# ## Three Psi
#
# Count it on your own run. A gather of all parameters is 1 Psi, a reduce-scatter of all gradients
# another.

# %% traffic
moved = {}
for stage in (0, 1, 2, 3):
    last = lab.train(stage=stage, model="gpt-nano", steps=1).ranks[0].records
    moved[stage] = {}
    for event in last.collectives:
        if event.purpose == "data":
            moved[stage][event.op] = moved[stage].get(event.op, 0) + event.elements
    nano = estimate.layout(gpt.GPT(gpt.preset("gpt-nano")), estimate.BUCKET_NUMEL, ranks)
    passes = {op: elements / nano.padded_numel for op, elements in moved[stage].items()}
    words = "  ".join(f"{op} {number:.0f} Psi" for op, number in passes.items())
    total = estimate.elements_moved(stage, nano.padded_numel) / nano.padded_numel
    print(f"stage {stage}: {words}   formula {total:.0f} Psi, all-reduce counted twice")

# %% [markdown] traffic-why
# So why three? **Forward gathers the parameters (1), backward gathers them again because they were
# freed in between (2), and the gradients are reduce-scattered (3).** Stages 1 and 2 also do the
# third, and in place of the first two they gather once, after the step. Stage 0 reduce-scatters and
# gathers gradients, in one call. An article's table has
# "all-gather" for stage 3's forward and "reduce-scatter" for its backward: the gather in backward
# is missing.
#
# "Significantly more", says another. In volume it is 1.5 times, and against DeepSpeed's default
# stage 2, which all-reduces, it is equal. What hurts in practice is that the gathers are many, and
# each must be there in time.

# %% accumulation
from zerolab.lab.chapters import unit_runs

for micro_steps in (1, 2, 4):
    shown = unit_runs.run(unit_runs.Plan(3, ranks, accum_steps=micro_steps))[0]
    total = sum(shown.moved.values()) / unit_runs.stack_numel(ranks)
    print(f"{micro_steps} micro-steps: {total:.0f} Psi a step")

# %% [markdown] accumulation-why
# With accumulation every micro-step pays all three: 3 G Psi. Stage 1 moves 2 Psi whatever G is. So
# "accumulation lowers communication", which an article counts as a right answer, is wrong here.

# %% [markdown] bits-heading
# ## The same bits

# %% bits
for stage in (0, 3):
    losses = lab.train(stage=stage, model="gpt-nano", dtype="fp32", steps=3).losses
    print(f"stage {stage}: {losses}")

# %% [markdown] break-heading
# ## Forget to reshard
#
# Your stage with one line less: after forward everything stays. What happens under the ceiling that
# it has just passed, and in which of the two steps?

# %% break
Mine = lab.running("zerolab.zero3:Zero3")


class Hoarder(Mine):
    def post_forward(self, unit):
        pass


with lab.plugged("zerolab.zero3:Zero3", Hoarder):
    hoarded = lab.train(stage=3, model="gpt-1m", gpu_memory=ceiling)
hoarded

# %% [markdown] break-one
# Now only the last rank forgets, and memory is ample. Which rank suffers, and do the others notice?
# Decide before you run the cell.


# %% break-on-one-rank
class OneHoards(Mine):
    def post_forward(self, unit):
        if comm.get_rank() < comm.get_world_size() - 1:
            super().post_forward(unit)


with lab.plugged("zerolab.zero3:Zero3", OneHoards):
    alone = lab.train(stage=3, model="gpt-nano")
alone

# %% [markdown] broken
# In forward all gathers match, so nobody notices. In backward the last rank has its units already
# and does not gather; the others wait for it in an all-gather while it is in a reduce-scatter. Two
# ranks may *hold* different things. They must not *call* different things. On real GPUs without
# checks this is a job that hangs.
#
# A mixture of experts comes to the same without a bug: a rank where no token chose expert 3 does
# not run it and, if that expert is a unit, does not gather it. So all experts of a layer must be
# one unit, a *leaf module*: `set_z3_leaf_modules` here, and in DeepSpeed since pull request 4966.

# %% [markdown] hunt-heading
# ## Find the bug
#
# Somebody's `Zero3` is in the engine. One bug of this hunt stood in public code: in
# Tiny-DeepSpeed's stage 3 the tensor without memory is made and not stored, so that nothing is ever
# freed (read in its source; until August 2025 it did not synchronise gradients either, says issue
# 2). The losses say nothing. Only memory and traffic tell.
#
# Name the misconception with its letter, `lab.bug_hunt("6.7", "LETTER")`; then mend the code and
# hand it in. `number=2` and `number=3` are the others.

# %% hunt
lab.bug_hunt("6.7")

# %% [markdown] trace-heading
# ## One step, call by call
#
# `yours` marks what you wrote. It is a first step, so nothing is gathered ahead: `units_ahead`
# finds no followers yet. Find where a block's memory goes in backward: not with its last gradient,
# but when the gradient of its input has come.

# %% trace
lab.trace(stage=3, depth=1)

# %% [markdown] diff-heading
# ## The stage as a difference to stage 2

# %% diff
from zerolab import unit_sharding, zero2, zero3

print(inspect.getsource(unit_sharding.UnitSharding.place))
print("moments:  ", ", ".join(name for name in vars(zero3.Zero3) if not name.startswith("_")))
print("as before:", ", ".join(name for name in vars(zero2.Zero2) if not name.startswith("_")))

# %% [markdown] diff-why
# `reduce` and `receive` of stage 2 are used as they are: gradients know nothing of where parameters
# live. `publish` lost its gather. It did not go away: the next forward does it, unit by unit.

# %% [markdown] init-heading
# ## A model that one GPU cannot even build
#
# All this begins with a whole model on every rank. What if that does not fit? `zero.Init` shards
# each module when its constructor has ended, so that no more than one module is ever whole. The
# ceiling here is less than the model's weights in fp32.

# %% init
from zerolab import data, zero

wide = gpt.GPTConfig(seq_len=16, dim=128, num_heads=4, num_layers=8)
whole = 4 * gpt.num_params(wide)
small = int(whole * 0.95)


def build_and_train(sharded):
    torch.manual_seed(0)
    with zero.Init(enabled=sharded):
        model = gpt.GPT(wide)
    built = device.current().peak_bytes
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 60_000},
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = zerolab.initialize(model=model, config=config)
    rank, world_size = comm.get_rank(), comm.get_world_size()
    batches = data.batches(data.load_text(), rank, world_size, 1, wide.seq_len, 0)
    for _ in range(2):
        engine.backward(engine(*next(batches)))
        engine.step()
    return f"built with {built:,} bytes at most, trained with {device.current().peak_bytes:,}"


print(f"the model is {whole:,} bytes, a GPU {small:,}")
for sharded in (False, True):
    try:
        said = zerolab.run(build_and_train, ranks, "lockstep", gpu_memory=small, args=(sharded,))
        print("with zero.Init:", said[0])
    except torch.OutOfMemoryError as error:
        print("without zero.Init:", str(error).split(". ")[0])

# %% [markdown] gathered-heading
# ## Looking at parameters that lie in shards
#
# Outside forward a parameter has no values. `GatheredParameters` makes it whole inside a `with`
# block, on all ranks together. Who wants to change it says on which rank the change is made;
# everybody gets that. Without it a change would be lost when the block ends, and that is an error,
# not a silence.


# %% gathered
def look_and_change():
    engine = tiny_engine()
    weight = engine.module.token_embedding.weight
    said = [f"outside: {weight}"]
    with zero.GatheredParameters(weight):
        said.append(f"inside: {weight.norm().item():.4f}")
    with zero.GatheredParameters(weight, modifier_rank=0):
        if comm.get_rank() == 0:
            weight.data.mul_(2)
    with zero.GatheredParameters(weight):
        said.append(f"doubled on rank 0, seen here: {weight.norm().item():.4f}")
    try:
        with zero.GatheredParameters(weight):
            weight.data.zero_()
    except zerolab.UsageError as error:
        said.append(str(error))
    return said


for line in zerolab.run(look_and_change, ranks, world="lockstep")[-1]:
    print(line)

# %% [markdown] bridge-heading
# ## The same in PyTorch: FSDP2
#
# `fully_shard` is torch's stage 3. A call on a module makes it a unit; the last call, on the whole
# model, takes the rest as the root. Two processes, gloo, real torch code, the same model, data and
# optimizer.


# %% fsdp2
from torch.utils._python_dispatch import TorchDispatchMode


class CountCollectives(TorchDispatchMode):
    """Count the collectives that torch.distributed is asked for."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def nano_batches(steps):
    rank, world_size = comm.get_rank(), comm.get_world_size()
    stream = data.batches(data.load_text(), rank, world_size, 1, 64, 0)
    return [next(stream) for _ in range(steps)]


def fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = gpt.GPT(gpt.preset("gpt-nano"))
    mesh = init_device_mesh("cpu", (comm.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens, targets in nano_batches(3):
        with CountCollectives() as counted:
            loss = model(tokens, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 5))
    return losses, counted.counts


for losses, counts in zerolab.run(fsdp2, world_size=2, world="gloo", ledger=False):
    print(losses, counts)


# %% ours-on-gloo
def ours():
    engine = tiny_engine()
    losses = []
    for tokens, targets in nano_batches(3):
        first = len(engine.records().collectives)
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(round(loss.item(), 5))
    calls = [e.op for e in engine.records().collectives[first:] if e.purpose == "data"]
    return losses, {op: calls.count(op) for op in sorted(set(calls))}


for losses, counts in zerolab.run(ours, world_size=2, world="gloo"):
    print(losses, counts)

# %% [markdown] bridge-why
# The same losses, to a unit of the last digit shown, since the two round in other places. FSDP2
# shards every parameter by its first dimension, this engine one flat buffer a unit; torch's states
# have nearly the names of yours. By default FSDP2 does not free the root after forward, because
# backward needs it at once: one gather less, which here is an option.

# %% [markdown] deepspeed
# ## In DeepSpeed
#
# ```json
# {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
#  "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
#  "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 50000000,
#   "stage3_param_persistence_threshold": 100000, "stage3_max_live_parameters": 1000000000,
#   "stage3_max_reuse_distance": 1000000000}}
# ```
#
# These are DeepSpeed's defaults, and with them a small model shows nothing of stage 3: parameters
# up to the persistence threshold stay whole, and what backward will use again within the reuse
# distance is not freed. An article's stage-3 example lacks the optimizer: DeepSpeed then builds an
# engine for inference, and `backward` fails. Here each key does this:

# %% keys
KEYS = {
    "defaults of this course": {},
    "prefetch_bucket_size 0": {"prefetch_bucket_size": 0},
    "prefetch_bucket_size 1e6": {"prefetch_bucket_size": 1_000_000},
    "param_persistence_threshold 1e3": {"param_persistence_threshold": 1_000},
    "live and reuse 1e9": {
        "max_live_parameters": 10**9,
        "max_reuse_distance": 10**9,
    },
}


def measure_keys(more):
    engine = tiny_engine(**more)
    for tokens, targets in nano_batches(3):
        first, event = len(engine.records().collectives), len(engine.records().memory)
        engine.backward(engine(tokens, targets))
        engine.step()
    told = Story.of(engine.records(), first, event)
    calls = [e for e in engine.records().collectives[first:] if e.purpose == "data"]
    return len(told.gathers), sum(e.elements for e in calls), told.most


print(f"{'':34}{'gathers':>8}{'moved':>10}{'gathered, at most':>20}")
for name, more in KEYS.items():
    gathers, elements, most = zerolab.run(measure_keys, ranks, "lockstep", args=(more,))[0]
    print(f"{name:34}{gathers:>8}{elements:>10,}{most:>20,}")

# %% [markdown] keys-why
# Prefetch changes when, not how much. Persistence trades memory for fewer elements: small
# parameters stay whole, lie in buckets of their own, and are gathered once, after the step. Live
# and reuse together let units stay from forward to backward: 2 Psi, as FSDP2's
# `reshard_after_forward=False`, and the memory of the whole model.

# %% [markdown] sample-heading
# ## What it writes
#
# The model of this course on your stage 3. Generating text needs all ranks as well: for every
# letter each unit is gathered once, and a rank whose text ended early would leave the others
# waiting. After so few steps expect letters and spaces, in about the right number.


# %% sample
def write(steps, numel):
    from itertools import islice

    torch.manual_seed(0)
    small = gpt.preset("gpt-nano")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    }
    engine, *_ = zerolab.initialize(model=gpt.GPT(small), config=config)
    stream = data.batches(data.load_text(), comm.get_rank(), ranks, 4, small.seq_len, seed=0)
    for tokens, targets in islice(stream, steps):
        engine.backward(engine(tokens, targets))
        engine.step()
    luck = torch.Generator().manual_seed(1)
    letters = gpt.generate(engine, data.encode("She "), small.seq_len, luck)
    return data.decode(list(islice(letters, numel)))


print("after 30 steps: She " + zerolab.run(write, ranks, args=(30, 40), ledger=False)[0])

# %% [markdown] own-heading
# ## Your engine, by itself
#
# What you wrote so far is spliced into a package of its own, `my_zerolab`. It does not need this
# notebook, nor the package it was made from. First on threads, then as two processes that
# `torchrun` starts: the command with which it would run on real GPUs.

# %% own-copy
copy = lab.my_zerolab()


# %% torchrun
def losses_of(*words):
    """Run `python -m ...` beside the copy; return the losses that it prints."""
    command = [sys.executable, "-m", *words, "--stage", "3", "--model", "gpt-nano"]
    command += ["--dtype", "fp32", "--steps", "3", "--json"]
    done = subprocess.run(command, cwd=copy.parent, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["losses"]


torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "-m")
threads = losses_of("my_zerolab", "train", "--gpus", "2", "--world", "lockstep")
processes = losses_of(*torchrun, "my_zerolab", "train")
print("lockstep:", threads)
print("torchrun:", processes)
print("the same bits:", threads == processes)

# %% [markdown] record-heading
# ## Your record, and the answer

# %% answer
from zerolab.lab import own_text, plug

texts = [own_text.text_of(target, own) for target, own in plug.entries().items()]
lines = sum(len(text.source.splitlines()) for text in texts)
calls = [e for e in run.ranks[0].records.collectives if e.purpose == "data"]
print(f"at the peak {run.peak_bytes / 2**20:.2f} MiB, stage 2 {free.peak_bytes / 2**20:.2f} MiB")
print(f"{len(calls) // len(run.losses)} collectives a step, {lines} lines of yours")
print(f"moved {run.ranks[0].elements_moved:,} elements = 3 x {sizes.padded_numel:,}")
print(f"whole at most {Story.of(run.ranks[0].records).most:,} bytes: root, a block, the next one")

# %% [markdown] interview
# ## In the interview
#
# *"What does ZeRO stage 3 do, and what does it cost?"*
#
# **30 seconds.** Every rank keeps 1/N of the parameters, gradients and optimizer states: 16 Psi /
# N. Before a block computes its parameters are all-gathered, afterwards they are freed; in backward
# the same again, and its gradients are reduce-scattered. That is 3 Psi a step in place of 2. At the
# peak a rank holds its shards, the block at hand and the one on its way, gradients of as much, and
# activations.
#
# **Two minutes.** Add: it is data parallelism, not model parallelism; every rank runs every layer.
# The unit decides: the whole model as one unit saves nothing while it computes. Prefetch hides
# latency and costs one unit of memory; the order comes from the last step, and backward has its
# own. Not resharding after forward gives 2 Psi, and at that moment the memory of stage 2 for
# parameters. Accumulation over G micro-steps moves 3 G Psi. Freed memory must go from under
# autograd's saved tensors: FSDP resizes the storage, DeepSpeed exchanges `param.data` and brings a
# linear layer of its own that saves the parameter and no view of it. Weights used by two units go
# where they live longest. A model that does not fit one GPU has to be built sharded. Between nodes
# the network is slow, so one may shard within a node and replicate across nodes: hybrid sharding,
# HSDP in torch, and for the gathers hpZ in DeepSpeed. And when somebody says that it is ten times
# slower, I count gathers and look whether they overlap, before I talk about volume.
#
# **Follow-ups.** How long do the gathers of a 65B model take at 10 Gb/s a GPU? With N = 3? What
# does a unit twice as large change? Each is a cell:

# %% follow-ups
seconds = estimate.elements_moved(3, 65 * 10**9) * 2 / (10e9 / 8)
print(f"65B in bf16 at 10 Gb/s: {seconds:.0f} s a step for traffic alone")
three = estimate.layout(gpt.GPT(shape), estimate.BUCKET_NUMEL, 3)
print(f"N = 3: {three.padded_numel - psi} elements of padding in {psi:,}")
units = list(sizes.unit_numels())
double = [units[0], units[1] + units[2], units[3] + units[4], units[5]]
for cut in (units, double):
    print(f"{len(cut)} units: at most {estimate.gathered_peak_numel(cut):,} elements whole")

# %% [markdown] drawing
# ## "Draw one step of stage 3, for two blocks"
#
# On paper, in 5 minutes: two lanes, computation above and communication below, time to the right.
# Leave the root out. Then give yourself a point for each line:
#
# | | in your drawing |
# |---|---|
# | gathers | each block twice: before its forward, and before its backward |
# | order | forward 1, 2; backward 2, 1 |
# | ahead | 2 is being gathered while 1 runs forward; 1 while 2 runs backward |
# | frees | a block after its forward, and again when all its gradients are there |
# | reduce-scatter | once a block, when its backward is over: that of 2 beside the backward of 1 |
# | update | own slices only, and no gather after it |
# | peak | marked early in backward: activations, two blocks whole, the first gradients |
# | sum | 1 + 1 + 1 = 3 Psi, and 3 G Psi with G micro-steps |
#
# A point more for whoever objects: block 2 is freed at the end of forward and gathered again at
# once. torchtitan keeps its last layers from forward to backward for this reason.
#
# Now real steps of a model with one block more. Who calls what stands above, in the cell `trace`:
# a first step, where nothing is gathered ahead yet. How units come and go in the second:

# %% drawn
again = lab.train(stage=3, model="gpt-nano")
events = Story.of(again.ranks[0].records).events
second = [event for event in events[len(events) // 2 :] if "root" not in event]
print(textwrap.fill(" ".join(second), 96))

# %% [markdown] from-memory
# ## From memory, against the clock
#
# The heart of stage 2 (chapter 05), in 12 minutes, without looking: where a bucket's mean goes, and
# why the full gradients die. `keep_own_slice`, `kind_of_mean` and `reducing.receive` are there. Run
# the next cell when you begin. The check is the one of chapter 05.

# %% clock
import time

began = time.monotonic()

# %% exercise zerolab.zero2:Zero2
lab.check("5.3", Zero2)
print(f"{(time.monotonic() - began) / 60:.1f} of 12 minutes")

# %% [markdown] quiz-heading
# ## Questions

# %% quiz
lab.quiz("06", part="chapter")

# %% [markdown] summary
# ## Where you are
#
# | | |
# |---|---|
# | **unit** | what is gathered and freed together: a block; the rest is the root |
# | **unshard, reshard** | memory back and a gather; NaN in the parameters and `resize_(0)` |
# | **16 Psi / N** | held between steps |
# | **at the peak** | and the root, one block and its neighbour, their gradients, and activations |
# | **3 Psi** | gathered for forward, gathered for backward, gradients reduced; times G |
# | **zero.Init, GatheredParameters** | built without being whole; looked at in a `with` block |
#
# Stages 0 to 3 are yours now, and they run in bf16 as if that were nothing. It is not: fp16 can
# count to 65,504 and no further, one rank's overflow concerns all of them, and a norm that lies in
# shards is nobody's norm. That is chapter 07.
