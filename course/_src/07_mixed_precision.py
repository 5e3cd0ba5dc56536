# %% [markdown] title
# # Mixed precision: one decision for all ranks
#
# **The question.** In a step of fp16 one GPU of four finds an infinity among its gradients. The
# other three find nothing wrong. All four must now do the same, or their weights part for ever.
# How do three of them learn what only one has seen, and what does it cost? The last measurement
# of this chapter answers, at all four stages.
#
# *Estimated 145 minutes. You need chapters 03 to 05. You build the end of a training step: the
# loss scale, the agreement on overflow, the norm of gradients that nobody holds whole, and the
# sequence in which they happen.*

# %% question
import inspect
from itertools import islice

import torch
from torch import nn

import zerolab
from zerolab import comm, data, gpt, lab, precision
from zerolab.lab import own_text, plug
from zerolab.sim import estimate, states
from zerolab_widgets import DeadlockTable, EngineMap, MemoryBars, QuizCard

lab.begin("07")
lab.train(
    model="gpt-1m",
    dtype="fp32",
    stage=1,
    micro_batch_size=8,
    gpu_memory="32MiB",
    watch=MemoryBars(),
)

# %% [markdown] too-wide
# ## Thirty-two bits do not fit
#
# Stage 1 shards the optimizer and still dies. In chapter 01 the same run fitted, in bf16. What
# takes the room? Not the model states, for they cost 16 bytes a parameter either way:

# %% same-states
for kind in ("fp32", "bf16", "fp16"):
    each = states.bytes_per_param(kind)
    print(f"{kind}: {each}, {sum(each.values())} bytes a parameter")

# %% [markdown] activations-halve
# The activations do. (The bars say *temporary*: what dies in forward has not lived to be called an
# activation, chapter 01.) In 16 bits they are half as large, and so is what the ranks send.
# That is what mixed precision buys, with speed on GPUs that multiply 16-bit numbers faster. (An
# article that people prepare with lists it among the ways to shrink *model states*. You know
# better since chapter 01.) Its price is this chapter.

# %% [markdown] recall
# ## Before you begin
#
# Three questions from earlier chapters.

# %% recalled
QuizCard(lab.quiz("07", part="recall"))

# %% [markdown] formats
# ## Three ways to spend bits
#
# A floating number has a sign, an exponent (how far it reaches) and a fraction (how fine it is).

# %% format-table
print(
    f"{'':9} {'bits':>4} {'largest':>10} {'normal from':>12} {'smallest':>10} {'next after 1':>13}"
)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    print(
        f"{str(dtype)[6:]:9} {info.bits:4} {info.max:10.3g} {info.smallest_normal:12.2g} "
        f"{smallest:10.2g} {1 + info.eps:13.8f}"
    )

# %% [markdown] reach-or-fineness
# bf16 is fp32 with its last 16 bits cut off: it reaches as far and is coarse. fp16 divides its 16
# bits otherwise, five for the exponent and ten for the fraction: eight times finer than bf16, and
# it ends at 65,504. Below the smallest normal number the steps no longer shrink, so precision
# fades away, and below the smallest of all there is only zero. Three sums show what that means:

# %% three-sums
for dtype in (torch.float16, torch.bfloat16):
    values = {
        "300 * 300": torch.tensor(300.0, dtype=dtype) * 300,
        "2048 + 1": torch.tensor(2048.0, dtype=dtype) + 1,
        "1e-8": torch.tensor(1e-8, dtype=dtype),
    }
    words = "   ".join(f"{what} = {value.item():g}" for what, value in values.items())
    print(f"{str(dtype)[6:]:9} {words}")

# %% [markdown] two-dangers
# fp16 fails at both ends: large numbers become infinite, small ones become zero. bf16 does
# neither here, but 2048 + 1 is lost on both. Each danger has its own remedy, and the chapter
# takes them from the last to the first: what is lost in a sum needs a clean copy, what vanishes
# needs a loss scale, what becomes infinite needs an agreement among all ranks.

# %% [markdown] predict-master
# ## Predict: why a clean copy
#
# In the metaphor of the class, the optimizer writes into a clean copy in fp32, and the textbook
# is printed anew from it after each step. The print is coarse, and nobody minds: forward and
# backward are content with it. But what if a pupil corrects the printed page itself?

# %% prediction-master
lab.predict("7.8", None)

# %% [markdown] after-prediction
# So a weight is *read* in 16 bits and *kept* in 32. The clean copy costs 4 bytes a parameter.
# None of the three articles says that the 12 bytes of "optimizer state" which ZeRO divides first
# are 4 + 4 + 4 only because of it: without master weights Adam would keep 8.

# %% [markdown] vanish
# ## What vanishes, and what a scale saves
#
# The gradients of a small GPT after one backward in fp32, counted as fp16 would see them: how
# many become zero, how many are *coarse* (below the smallest normal number, where digits are
# missing), how many infinite? A *loss scale* multiplies the loss, and by the chain rule every
# gradient.

# %% vanishing
torch.manual_seed(0)
shape = gpt.preset("gpt-nano")
model = gpt.GPT(shape)
tokens, targets = next(data.batches(data.load_text(), 0, 1, 2, shape.seq_len, seed=0))
model(tokens, targets).backward()
grads = torch.cat([param.grad.flatten() for param in model.parameters()])
grads = grads[grads != 0]
for power in (0, 8, 16, 20, 24):
    seen = (grads * 2.0**power).half().abs()
    lost = (seen == 0).float().mean()
    coarse = (seen < torch.finfo(torch.float16).smallest_normal).float().mean() - lost
    broken = seen.isinf().float().mean()
    print(f"scale 2**{power:<3} zero {lost:7.2%}   coarse {coarse:7.2%}   infinite {broken:7.2%}")

# %% [markdown] window
# Even this young model, whose gradients are large, loses digits without a scale, and there is a
# window of scales in which next to nothing is lost at either end. Nobody knows where: it moves
# while the model learns. So the scale is *dynamic*: as large as possible, halved when something
# overflows, doubled after many good steps. A step that overflowed is not made; its batch is lost,
# and that is cheap when it happens once in a thousand steps. (Micikevicius et al., *Mixed Precision
# Training*, 2018.) The scale is a power of two, so that multiplying with it changes the exponent
# alone and rounds nothing.

# %% [markdown] your-turn-blank
# ## Your turn, on an empty page
#
# The whole idea on two layers, with torch and `comm` alone; the docstring is all you get. Two
# things decide whether it works. *All* ranks skip when *any* rank overflows. And the scale that
# multiplied the loss is the one that divides the gradients.
#
# The check trains six steps on four ranks, one of which meets a batch that overflows. It compares
# your scales and your master weights with torch's `GradScaler` in one process, and counts the
# bytes that you hold between two steps. *About 25 minutes;* `lab.hint("7.1")` helps. You may also
# go on with the reference and come back.

# %% exercise zerolab.two_layers.mixed_precision:train_mixed_precision
lab.check("7.1", train_mixed_precision)

# %% [markdown] on-the-wire
# ## In which type do gradients travel?
#
# Four ranks, each with a gradient of 30,000 in fp16. A sum of four has no place in fp16. A mean
# has, if it is divided before it is rounded. bf16 reaches far enough and keeps two digits, at times
# three.


# %% wire-types
def travel(dtype, op):
    grad = torch.full((2,), 30_000.0 + comm.get_rank()).to(dtype)
    comm.all_reduce(grad, op)
    return grad[0].item()


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    total, mean = (
        zerolab.run(travel, world_size=lab.world_size(), args=(dtype, op))[0]
        for op in ("sum", "avg")
    )
    print(f"{str(dtype)[6:]:9} sum {total:>9,.1f}   mean {mean:>9,.1f}")

# %% [markdown] communication-type
# `comm` adds in fp32 in rank order and rounds once. Not every library does: gloo's own ring adds in
# the type that travels, and rounds at every hop. DeepSpeed's key `communication_data_type` chooses
# the type on the wire, and `data_types.grad_accum_dtype` the one in which micro-steps are added.
# (An article says that a reduce-scatter can carry 16 bits only; DeepSpeed 0.19.8 accepts fp32.) The
# price is bytes:


# %% wire-bytes
def one_step(more):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {}},
    } | more
    engine, *_ = zerolab.initialize(model=gpt.GPT(shape), config=config)
    rank, ranks = comm.get_rank(), comm.get_world_size()
    engine.backward(engine(*next(data.batches(data.load_text(), rank, ranks, 2, 32, seed=0))))
    engine.step()
    sent = [e for e in engine.records().collectives if e.op == "reduce_scatter"]
    return {e.dtype for e in sent}, sum(e.nbytes for e in sent), engine.state_bytes()["grad"]


wire = {"communication_data_type": "fp32"}
both = wire | {"data_types": {"grad_accum_dtype": "fp32"}}
for name, more in {"bf16": {}, "fp32 on the wire": wire, "fp32 to the step": both}.items():
    dtypes, sent, kept = zerolab.run(one_step, world_size=lab.world_size(), args=(more,))[0]
    print(f"{name:17} sent {sent:>7,} bytes in {dtypes}, {kept:>7,} bytes of gradients kept")

# %% [markdown] your-turn-squares
# ## Your turn: the squares of a shard
#
# Now the parts of the engine's own step. Clipping needs the norm of all gradients, and a norm
# begins with squares: of values in fp16, of a bucket that may be long, in a sum whose last bit
# must not depend on luck. Why fp64, where the gradients have eleven bits? A sum of many squares
# in fp32 changes in its last digits with the place where it was cut into shards, and so with the
# number of ranks: the same model on three GPUs would be clipped by another factor than on four.
# In fp64 the difference is so small that rounding the factor to fp32 nearly always removes it.
# *About 8 minutes.*

# %% exercise zerolab.precision:square_sum
lab.check("7.2", square_sum)

# %% [markdown] your-turn-flags
# ## Your turn: does any rank object?
#
# In the class: before anybody writes into the clean copy, the teacher asks whether somebody found
# nonsense in the notes. One raised hand is enough, and all put their pens down. The pupil who
# raised it may sit anywhere, and the others cannot see the page.
#
# One small collective does that. The same message carries other yes-or-no questions: which
# parameters were used anywhere, which buffers changed. So the agreement costs no wait of its own.
# *About 6 minutes.*

# %% exercise zerolab.precision:any_rank
lab.check("7.3", any_rank)

# %% [markdown] drill
# ## An overflow drill
#
# A GPT in fp16 whose loss has a term that blows up the gradient of a *single* weight, on the last
# rank, in the second step. The drill returns what each rank did.


# %% the-drill
class Drill(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gpt = gpt.GPT(shape)

    def forward(self, tokens, targets, poison):
        return self.gpt(tokens, targets) + poison * self.gpt.last_norm.bias[0].float()


def drill(stage, dtype="fp16", steps=3):
    precise = {
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        "bf16": {"enabled": True},
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        dtype: precise[dtype],
    }
    engine, *_ = zerolab.initialize(model=Drill(), config=config)
    rank, ranks = comm.get_rank(), comm.get_world_size()
    batches = data.batches(data.load_text(), rank, ranks, 1, shape.seq_len, seed=0)
    seen = []
    for step in range(steps):
        poison = 1e6 if step == 1 and rank == ranks - 1 else 0.0
        engine.backward(engine(*next(batches), poison))
        engine.step()
        seen.append((engine.was_step_applied(), engine.loss_scale()))
    weights = torch.cat([w.double().flatten() for w in engine.module_state_dict().values()])
    return seen, weights.sum().item(), engine.get_global_grad_norm()


for rank, (seen, _, _) in enumerate(zerolab.run(drill, world_size=lab.world_size(), args=(2,))):
    print(f"rank {rank}:", "  ".join(f"{'step' if ok else 'SKIP'} {scale:g}" for ok, scale in seen))

# %% [markdown] break-it
# ## Break it on purpose: everybody decides alone
#
# Let each rank believe its own eyes. At stage 0 nothing happens: after an all-reduce *every* rank
# holds the infinite mean. At stage 2 the mean of that one weight lies on one rank only. Which
# rank suffers?


# %% alone
def believes_its_own_eyes(flags, target):
    return list(flags)


for stage in (0, 2):
    with lab.plugged("zerolab.precision:any_rank", believes_its_own_eyes):
        try:
            ranks = zerolab.run(drill, world_size=lab.world_size(), args=(stage,))
            print(f"stage {stage}:", [[ok for ok, _ in seen] for seen, _, _ in ranks])
        except zerolab.DeadlockError as error:
            torn = error
            print(f"stage {stage}: {str(error).splitlines()[0]}")

# %% torn
DeadlockTable(torn)

# %% [markdown] who-suffers
# One rank has skipped and sends gradients of the next step already; the others wait for its norm,
# or have not come that far. The rank that saw the infinity is the owner of that element, and not
# the one with the bad batch: by now the mean has carried it there. This is the lucky case, for
# the run stops and a table says why.

# %% [markdown] drift-heading
# ## The unlucky case
#
# Suppose all skip together, but only the rank with the bad batch halves its scale. Nobody waits
# for anybody. From then on the ranks multiply their losses with different numbers, add the
# results up, and each divides by its own:


# %% drift
class HalvesWhereItHurt(lab.running("zerolab.precision:LossScaler")):
    def update(self, overflow):
        if not overflow or comm.get_rank() == comm.get_world_size() - 1:
            super().update(overflow)


with lab.plugged("zerolab.precision:LossScaler", HalvesWhereItHurt):
    for rank, (seen, total, _) in enumerate(
        zerolab.run(drill, world_size=lab.world_size(), args=(0, "fp16", 5))
    ):
        print(f"rank {rank}: scales {[scale for _, scale in seen]}, sum of weights {total:.9f}")

# %% [markdown] drifted
# The sums have parted, and nothing will bring them together again. (Adam hides much of it, since
# it divides by the size of the gradients; with SGD it would be plain.) Each rank now trains a model
# of its own, and every loss curve looks fine. A wrong number that all ranks share is a bug; a
# right number that they do not share is a worse one. So the scaler has no collective in it: it
# draws its conclusions from the agreement alone, and equal inputs keep the copies equal.

# %% [markdown] predict-clip
# ## Predict: clipping by the norm of a shard
#
# Clipping shortens a gradient that is longer than `max_norm`, and leaves its direction. At stage
# 2 a rank holds a quarter of it. It is tempting to clip that quarter by its own norm: no message
# at all, and the norm that is logged looks reasonable.

# %% prediction-clip
lab.predict("7.9", None)

# %% [markdown] your-turn-norm
# ## Your turn: the norm that nobody holds
#
# "In the step a rank needs nothing from the others", says an article on ZeRO-2. It needs two
# things: the flag you have just written, and this. Send no gradients, only sums of squares, one
# for each piece of a parameter that lies in one shard. `square_table` sums the pieces that this
# rank owns: padding belongs to no piece, and a tied weight lies in one place, so both count
# right.
#
# Add in one fixed order, and all stages get the same last bit. The check compares with fp64 sums
# over whole gradients at four stages and three numbers of ranks, and with `clip_grad_norm_` in
# one process; it counts the collectives too. *About 20 minutes.*

# %% exercise zerolab.precision:global_norm
lab.check("7.4", global_norm)

# %% [markdown] your-turn-factor
# ## Your turn: one multiplication
#
# Gradients must be divided by the scale and shortened to `max_norm`. Two passes over all gradients
# are one too many. And mind which norm you hold: that of the *scaled* gradients. (With torch's
# `GradScaler`, `unscale_` comes before `clip_grad_norm_` for this reason.) The rule of clipping is
# there: `clip_factor(norm, max_norm)`, torch's own, with the 1e-6 that it adds to the norm. *About
# 8 minutes.*

# %% exercise zerolab.precision:step_factor
lab.check("7.5", step_factor)

# %% [markdown] your-turn-scaler
# ## Your turn: the scaler
#
# A class. `window` good steps in a row double the scale. With `hysteresis` 2 the first overflow
# is borne and the second halves: a single bad batch is no sign that the scale is too large. In
# DeepSpeed the scale begins at 2**16 and the window is 1,000; torch's `GradScaler` begins there
# too, waits 2,000 steps and bears nothing. There is a floor: a scale that fell to zero would make
# every gradient zero, and every step a good one. *About 20 minutes.*

# %% exercise zerolab.precision:LossScaler
lab.check("7.6", LossScaler)

# %% life-of-a-scale
scaler = precision.LossScaler(scale=2.0**16, dynamic=True, window=4, hysteresis=2)
line = []
for _ in range(22):
    scaler.update(overflow=scaler.scale > 2**17)  # what this model bears, which nobody knows
    line.append(f"{scaler.scale / 2**16:g}")
print("scale / 2**16 after each step:", " ".join(line))

# %% [markdown] your-turn-step
# ## Your turn: the end of a step
#
# Agree, decide, step or drop, and tell the scaler. Ten lines, and the order is everything: a widely
# used training system has two of them the wrong way round. `agree` is there; `global_norm` and
# `step_factor` are the ones you wrote. *About 15 minutes.*

# %% exercise zerolab.precision:run_step
lab.check("7.7", run_step)

# %% [markdown] hunt
# ## A bug hunt
#
# DeepSpeed 0.19.8, stages 1 to 3, fp16: on some steps an SGD update of 0.125 was 0.0625 (measured
# for this course; the same at each of the three stages). No error, no NaN, and the loss goes
# down. First, what your own step leaves in a small run whose scale grows, and which overflows
# once; then the same of a wrong one. Which steps are short?

# %% hunt-right
from zerolab.lab.chapters import c07_moments

for count in (1, 2, 3, 4):
    left = c07_moments.hunt_run_step(count).replace("; ", "\n    ")
    print(f"{count} rank{'s' * (count > 1)}\n    {left}")

# %% hunt-wrong
lab.bug_hunt("7.7", number=2)

# %% [markdown] hunt-note
# Name it with its letter, and mend it: one line moves. Two more wrong steps wait behind
# `number=1` and `number=3`.

# %% [markdown] trace
# ## One step, as it ran
#
# The calls of a step at stage 2, with yours among them.

# %% traced
lab.trace(stage=2, dtype="fp16", depth=1)

# %% [markdown] diff
# ## What this chapter adds to a stage
#
# Nothing in `zero1` or `zero2` changed. The stage still knows how to step and how to drop; *when*
# is said by the engine, in one method:

# %% engine-update
from zerolab.engine import Engine

print(inspect.getsource(Engine._update))

# %% [markdown] fits
# ## The run fits
#
# The ceiling of the beginning, in fp16, on your code.

# %% whose
lab.running()

# %% fits-now
run = lab.train(
    model="gpt-1m",
    dtype="fp16",
    stage=1,
    micro_batch_size=8,
    gpu_memory="32MiB",
    watch=MemoryBars(),
)
run

# %% three-types
runs = {
    dtype: lab.train(model="gpt-1m", dtype=dtype, stage=1, micro_batch_size=8)
    for dtype in ("fp32", "bf16")
}
for dtype, one in {**runs, "fp16": run}.items():
    held = sum(one.fullest.state_bytes.values()) / 2**20
    losses = " ".join(f"{loss:.4f}" for loss in one.losses)
    print(f"{dtype}: states {held:5.2f} MiB, peak {one.peak_bytes / 2**20:5.2f} MiB, {losses}")

# %% [markdown] types-compared
# At stage 0 the states would be equal. At stage 1 on four ranks they are not: in 16 bits 12 of the
# 16 bytes are in the part that is divided, in fp32 only 8. So a rank holds 2 + 2 + 12/4 bytes a
# parameter in place of 4 + 4 + 8/4.

# %% [markdown] record-heading
# ## Beside the formula
#
# Your personal record in fp16: what a rank held, what moved, and how much of it is yours.

# %% record
sizes = estimate.layout(gpt.GPT(gpt.preset("gpt-1m")), estimate.BUCKET_NUMEL, lab.world_size())
print("held   ", run.ranks[0].state_bytes)
print("formula", estimate.state_bytes(1, "fp16", sizes))
events = run.ranks[0].records.collectives
control = sum(e.nbytes for e in events if e.phase == "step" and e.purpose == "control")
moved = sum(e.nbytes for e in events if e.purpose == "data")
print(f"{moved:,} bytes of gradients and parameters, {control:,} bytes of flags in steps")
yours = {t: one for t, one in plug.entries().items() if t.startswith("zerolab.precision")}
lines = sum(len(own_text.text_of(t, one).source.splitlines()) for t, one in yours.items())
print(f"{lines} lines of yours, docstrings included, in the engine that ran")

# %% engine-map
EngineMap(run)

# %% [markdown] sample-heading
# ## What it writes
#
# The model of this course, some steps at stage 2, in fp16 with your scaler. It begins at 2**20,
# which is too much on purpose: the first steps are skipped until the scale fits.


# %% sample
def write(steps, numel):
    torch.manual_seed(0)
    model = gpt.GPT(shape)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, "hysteresis": 1, "initial_scale_power": 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    }
    engine, *_ = zerolab.initialize(model=model, config=config)
    rank, ranks = comm.get_rank(), comm.get_world_size()
    stream = data.batches(data.load_text(), rank, ranks, 4, shape.seq_len, seed=0)
    for tokens, targets in islice(stream, steps):
        loss = engine.backward(engine(tokens, targets))
        engine.step()
    luck = torch.Generator().manual_seed(0)
    written = gpt.generate(engine, data.encode("\n"), shape.seq_len, luck)
    text = data.decode(list(islice(written, numel)))
    skipped, scale = engine.skipped_steps, engine.loss_scale()
    return f"loss {loss.item():.3f}, {skipped} steps skipped, scale {scale:g}\n{text}"


print(zerolab.run(write, world_size=lab.world_size(), args=(30, 60))[0])

# %% [markdown] last-measurement
# ## The answer
#
# One overflow on one rank of the four, at every stage. The question was: what must all do, how do
# they know, and what does it cost?

# %% answer
for stage in (0, 1, 2, 3):
    ranks = zerolab.run(drill, world_size=lab.world_size(), args=(stage,))
    did, weights, norms = ({str(one) for one in column} for column in zip(*ranks, strict=True))
    print(f"stage {stage}, all ranks together: {len(did)} story, weights {weights}, norm {norms}")


# %% cost
def step_traffic():
    drill(2, steps=1)
    events = [e for e in comm.records().collectives if e.phase == "step"]
    return [(e.op, e.purpose, e.nbytes) for e in events]


for op, purpose, nbytes in zerolab.run(step_traffic, world_size=lab.world_size())[0]:
    print(f"{op:12} {purpose:8} {nbytes:>8,} bytes")

# %% [markdown] answered
# All skip, by one all-reduce of a byte for each yes-or-no question; the scale halves everywhere,
# and from then on the weights are the same on all ranks and at all stages, to the last bit. The
# norm costs eight bytes for each parameter tensor and rank. What costs is the *wait*: nobody can
# begin to step before the slowest rank has answered. That is why the flags travel together.
#
# An article says that ZeRO leaves the mathematics unchanged. In exact numbers, yes. In 16 bits a
# mean over ranks is rounded, sums have an order and steps are skipped: against one process with
# the whole batch the result is equal to a tolerance. Equal to the last bit, as here between the
# stages, is something that an engine must be built for.

# %% [markdown] bf16
# ## And bf16?
#
# The same drill, with the same poisoned batch:

# %% bf16-drill
seen, _, norm = zerolab.run(drill, world_size=lab.world_size(), args=(2, "bf16"))[0]
print("applied:", [ok for ok, _ in seen], " scale:", {scale for _, scale in seen})

# %% [markdown] bf16-why
# A million is no infinity in bf16, so there is nothing to skip, and no scale. Clipping shortened
# the spike. That is why large models are trained in bf16 wherever the hardware has it: two things
# less that can go wrong, at the price of three bits. bf16 still has infinities and NaN, from a
# division or a broken batch. Since 2026 DeepSpeed checks for them by default
# (`bf16.check_grad_overflow`, pull request 8035), and a user who does not know that sees a loss
# that stands still without a word (issue 8415). Count your skipped steps: `engine.skipped_steps`.

# %% [markdown] bridge
# ## The same with torch's FSDP2
#
# `fully_shard` with a `MixedPrecisionPolicy`, torch's `GradScaler`, two real processes with gloo;
# and ours at stage 3 on the same model and data. The second batch of rank 1 overflows. FSDP2's
# sharded parameters *are* the fp32 master weights; the fp16 copies live while they are gathered.


# %% fsdp2
def batch(rank, step):
    luck = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randn(4, 8, generator=luck), torch.randn(4, 2, generator=luck)
    return x, y * (1e6 if (step, rank) == (1, 1) else 1.0)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def with_fsdp2():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(mlp(), mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    seen = []
    for step in range(4):
        x, y = batch(dist.get_rank(), step)
        loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((round(loss.item(), 4), scaler.get_scale()))
    return seen


def with_zerolab():
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
    }
    engine, *_ = zerolab.initialize(model=mlp(), config=config)
    seen = []
    for step in range(4):
        x, y = batch(comm.get_rank(), step)
        loss = engine.backward(nn.functional.mse_loss(engine(x.half()).float(), y))
        engine.step()
        seen.append((round(loss.item(), 4), engine.loss_scale()))
    return seen


for name, function in (("FSDP2", with_fsdp2), ("zerolab", with_zerolab)):
    for rank, seen in enumerate(zerolab.run(function, world_size=2, world="gloo")):
        print(f"{name:8} rank {rank}  (loss, scale): {seen}")

# %% [markdown] compared
# The same losses, the same skipped step on both ranks, the same scale. FSDP2 lets the ranks agree
# in the same way: inside `scaler.step` a flag of sharded tensors is reduced with `max`
# (`found_inf_reduce_handler` in torch/distributed/tensor/_dispatch.py).

# %% [markdown] deepspeed
# ## In DeepSpeed
#
# ```json
# {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2},
#  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16,
#           "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
#  "gradient_clipping": 1.0, "communication_data_type": "fp32",
#  "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
# ```
#
# `"loss_scale": 0` means dynamic. Say what you want of clipping: DeepSpeed 0.19.8 clips at 1.0
# where the key is missing (in older releases, and here, no key is no clipping). For bf16 the block
# is `"bf16": {"enabled": true}`; both at once are refused. In a terminal: `zerolab train --dtype
# fp16 --stage 2`.

# %% [markdown] interview
# ## In the interview
#
# *"How do you train in fp16 on many GPUs with sharded gradients?"*
#
# **30 seconds.** Forward and backward in fp16, the update on fp32 master weights. The loss is
# multiplied with a dynamic scale, so that small gradients do not vanish. Before each step the
# ranks agree with one all-reduce whether any gradient overflowed; if so all skip and halve the
# scale. The clipping norm is the root of the squares of all shards, so that is a second small
# collective. bf16 needs no scale, because it has the exponent of fp32.
#
# **Two minutes.** Add: masters cost 4 bytes a parameter, so model states are 16 bytes as in fp32;
# what shrinks is activations and traffic. After an all-reduce every rank would see an infinity by
# itself; after a reduce-scatter only the owner of that element does, so without the agreement the
# ranks part: a deadlock at best, drifting weights at worst. Unscale and clip in one
# multiplication, with the norm divided by the scale first. The scale changes after the step,
# never between backward and unscaling. A skipped step leaves moments, step count and
# learning-rate schedule alone. Squares are added in fp64 in a fixed order, so all stages clip by
# the same last bit. With accumulation there is one decision at the boundary, and one scale from
# the first micro-step on.
#
# **Follow-ups.** With three ranks? With accumulation? Without clipping? Each is one call:


# %% follow-ups
def drill_with(more):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
    } | more
    engine, *_ = zerolab.initialize(model=Drill(), config=config)
    rank, ranks = comm.get_rank(), comm.get_world_size()
    batches = data.batches(data.load_text(), rank, ranks, 1, shape.seq_len, seed=0)
    for micro_step in range(8):
        poison = 1e6 if micro_step == 1 and rank == ranks - 1 else 0.0
        engine.backward(engine(*next(batches), poison))
        engine.step()
    control = [
        e for e in engine.records().collectives if e.phase == "step" and e.purpose == "control"
    ]
    return engine.global_steps, engine.skipped_steps, len(control)


for what, ranks, more in (
    ("three ranks, no clipping", 3, {}),
    ("clipping", 3, {"gradient_clipping": 1.0}),
    ("four micro-steps a step", 3, {"gradient_accumulation_steps": 4}),
):
    steps, skipped, control = zerolab.run(drill_with, world_size=ranks, args=(more,))[0]
    print(f"{what}: {steps} steps, {skipped} skipped, {control} control collectives in steps")

# %% [markdown] quiz-heading
# ## Questions

# %% quiz
QuizCard(lab.quiz("07", part="chapter"))

# %% [markdown] summary
# ## Where you are
#
# | | |
# |---|---|
# | **fp16** | fine, and short of reach: needs a loss scale and a check for overflow |
# | **bf16** | reaches as far as fp32, eight times coarser than fp16: needs no scale |
# | **master weights** | fp32, for changes smaller than half a unit of the 16-bit weight |
# | **agreement** | one all-reduce with `max`: all ranks skip, or none |
# | **norm** | squares of all shards, added in one order; never the norm of a shard |
# | **factor** | unscale and clip in one multiplication, by the scale that multiplied |
# | **16 bytes a parameter** | as in fp32; what shrinks is activations and traffic |
#
# The step that you wrote runs at every stage. What is left on the GPU? 12 of 16 bytes are touched
# once a step, by the optimizer. Must they lie in GPU memory the rest of the time? Chapter 08.
