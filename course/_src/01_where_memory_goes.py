# %% [markdown] title
# # Where memory goes
#
# **The question.** A small GPT has weights of two MiB in bf16, a number format of 16 bits. A GPU
# with sixteen times as much memory cannot train it. What fills it, which part is the largest, and
# which part does no stage of ZeRO make smaller? The last measurement of this chapter answers.
#
# *Estimated 60 minutes. You need chapter 00. You build the parts of an estimator, which
# says what a training run will hold before anything runs.*

# %% question
from zerolab import gpt, lab
from zerolab.sim import estimate, states
from zerolab_widgets import MemoryBars, MemoryExplorer, MemoryTimeline

lab.begin("01")
shape = gpt.preset("gpt-1m")
psi = gpt.num_params(shape)  # Psi, a count of parameters
print(f"{psi:,} parameters, {2 * psi / 2**20:.2f} MiB in bf16")
lab.train(model="gpt-1m", micro_batch_size=8, gpu_memory="32MiB", watch=MemoryBars())

# %% [markdown] four-kinds
# ## Four books for every parameter
#
# The run stopped, and its message says what lay in memory, by kind. Four of the kinds are there
# for the sake of the parameters. Picture a class that revises for an exam. Every pupil carries the
# whole set of books:
#
# | book | kind | holds | used |
# |---|---|---|---|
# | the textbook | `param` | the weights, in 16 bits | in every forward and backward |
# | the margin notes | `grad` | what this lesson changes, as wide as the weights | once a step |
# | the clean copy | `master` | the weights once more, in fp32 | when the optimizer updates |
# | the revision notebooks | `optimizer` | Adam's two averages, in fp32 | then too |
#
# The rest is work in progress. `temp` is what an operation has just computed. Only when backward
# begins can the *ledger*, which counts the bytes of a virtual GPU, tell which of it was kept for
# backward; from then on that is `activation`.
# So a run that dies in forward reports its activations as `temp`.
#
# Why a clean copy? A step of AdamW moves a weight by about the learning rate, often 0.001 or less.
# bf16 has eight bits of precision: a change below 1/512 of the weight is always rounded away, and
# the weight stops learning.

# %% rounding
import torch

weight = torch.tensor(1.0, dtype=torch.bfloat16)
print("bf16:", (weight + 0.001).item(), "   fp32:", round((weight.float() + 0.001).item(), 6))

# %% [markdown] your-turn-bytes
# ## Your turn: what one parameter costs
#
# Return the four numbers, in bytes, for a precision and an optimizer. Three names of the module are
# there for you: `PARAM_BYTES["bf16"]` is 2, `MASTER_BYTES` is 4, and
# `state_of("adamw").bytes_per_param` is 8. *About 8 minutes;* `lab.hint("1.1")` helps.

# %% exercise zerolab.sim.states:bytes_per_param
lab.check("1.1", bytes_per_param)

# %% [markdown] two-claims
# ## Two sentences to distrust
#
# Both are from articles that people prepare with. Your function settles them.
#
# - "Mixed precision reduces the memory of model states."
# - "Optimizer states are two to four times the size of the parameters."

# %% settle
for precision in ("fp32", "bf16"):
    each = states.bytes_per_param(precision)
    kept = each["master"] + each["optimizer"]
    print(f"{precision}: {each}, in all {sum(each.values())} bytes a parameter;")
    print(f"      what the optimizer keeps is {kept / each['param']:.0f} times the weights")

# %% [markdown] settled
# The sum is the same: the clean copy takes back what the textbook and the notes saved. Mixed
# precision saves *activations*, traffic and time. And the factor is two in fp32 only; next to
# 16-bit weights the optimizer's share is larger, and it is the reason why ZeRO begins there.

# %% [markdown] your-turn-kinds
# ## Your turn: what each stage divides
#
# Four pupils look at the last column of the table. Some books are needed only in the last minute of
# a lesson, when the optimizer updates. So each pupil keeps a quarter of those, and tells the others
# what came out. That is stage 1. Stage 2 divides one book more, stage 3 the last one. The order in
# the tuple does not matter.
#
# A third article says that stage 1 "splits these 16 bytes". Does it? *About 5 minutes.*

# %% exercise zerolab.sim.states:sharded_kinds
lab.check("1.2", sharded_kinds)

# %% [markdown] four-stages
# ## The whole table, on your two functions
#
# `model_states` multiplies what you wrote. The paper's example: 7.5 billion parameters, 64 GPUs.

# %% paper-table
for stage in (0, 1, 2, 3):
    each = states.model_states(7_500_000_000, 64, stage)
    words = "  ".join(f"{kind} {size / 1e9:6.2f}" for kind, size in each.items())
    print(f"stage {stage}: {words}   in all {sum(each.values()) / 1e9:6.2f} GB")

# %% [markdown] your-turn-factor
# ## Your turn: how much is saved?
#
# "ZeRO-1 saves 4x to 8x", says an article, and its table has "about 4x" and "about 8x" without a
# number of GPUs. A factor depends on N. Write it: how many times smaller are the states of a stage
# than those of stage 0? `bytes_per_param(...)` and `sharded_kinds(...)` are there. *About 8
# minutes.*

# %% exercise zerolab.sim.states:saving_factor
lab.check("1.3", saving_factor)

# %% factor-table
print("N      " + "".join(f"{n:>9,}" for n in (4, 8, 64, 1024)))
for stage in (1, 2, 3):
    row = "".join(f"{states.saving_factor(stage, n):>9.2f}" for n in (4, 8, 64, 1024))
    print(f"stage {stage}{row}")

# %% [markdown] limits
# So 4 and 8 are *limits* of stages 1 and 2 that no number of GPUs reaches; 8 was never stage 1's.
# In an interview, say the formula and put N in.

# %% [markdown] three-calculators
# ## Three calculators, three answers
#
# Ask the same question of an article's estimator, of yours, and of DeepSpeed's.

# %% calculators
GB, GIB, size, gpus = 1e9, 2**30, 7_500_000_000, 64
article = estimate.article_estimate(7.5, gpus, 2)
ours = states.model_state_bytes(size, gpus, 2)
deepspeed = estimate.estimate_zero2_model_states_mem_needs(size, 8, 8, cpu_offload=False)[1]
print(f"article    {article:.2f} GB, from a variable `psi_bytes` that holds a count")
print(f"yours      {ours / GB:.2f} GB = {ours / GIB:.2f} GiB")
print(f"DeepSpeed  {deepspeed / GB:.2f} GB = {deepspeed / GIB:.2f} GiB, which it prints as GB")
print(f"a GiB is {GIB / GB:.3f} GB")

# %% [markdown] calculators-why
# Three things differ. A *count* became "bytes" in the article's name, which goes well until
# somebody multiplies by two once more. GB and GiB are seven percent apart. And DeepSpeed's own
# estimator counts other bytes: it supposes 32-bit gradients on the way. None of the three knows
# activations, which come next, nor the buffers in which gradients and layers travel, which later
# chapters add.

# %% [markdown] hunt
# ## Find the bug
#
# A wrong estimator makes people buy the wrong machines, and it raises no error. This bug is public:
# DeepSpeed's own estimator had it, until pull request 5099 of 2024; issue 5102 describes it. Here
# it is in your `sharded_kinds`. Read the evidence, work out what a parameter should cost, and name
# the belief behind it. Then mend it. *About 6 minutes.*

# %% bug-hunt
lab.bug_hunt("1.2", number=2)

# %% [markdown] activations
# ## What forward leaves on the desk
#
# Backward needs what forward computed: inputs of matrix products, of the activation function, of
# dropout. For one layer in 16 bits, with `s` tokens in each of `b` sequences, width `h` and `a`
# heads (4 sbh is 4 times s times b times h):
#
# | kept for backward | bytes |
# |---|---|
# | inputs of two layer norms | 4 sbh |
# | input of the query, key and value products | 2 sbh |
# | query, key and value | 6 sbh |
# | attention's output, before its projection | 2 sbh |
# | input of the first MLP product | 2 sbh |
# | input of the activation function and its output | 16 sbh |
# | two dropout masks, a byte an entry | 2 sbh |
# | attention maps: after softmax, after dropout, and a mask | (2 + 2 + 1) a s²b |
#
# Source: Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*
# (2022), equation 1.

# %% [markdown] your-turn-activations
# ## Your turn: the activations of a layer
#
# Add the table up. With `checkpointed=True` only the layer's input is kept, two bytes a number,
# and the layer runs once more in backward. *About 10 minutes;* `lab.hint("1.4")` helps.

# %% exercise zerolab.sim.activations:paper_activation_bytes
lab.check("1.4", paper_activation_bytes)

# %% seven-billion
from zerolab.sim import activations

for seq_len in (2048, 8192):
    whole = 32 * activations.paper_activation_bytes(seq_len, 1, 4096, 32)
    kept = 32 * activations.paper_activation_bytes(seq_len, 1, 4096, 32, checkpointed=True)
    print(f"32 layers, {seq_len:,} tokens: {whole / 1e9:6.1f} GB, checkpointed {kept / 1e9:.2f} GB")

# %% [markdown] square
# Four times the tokens are far more than four times the bytes: an attention map has an entry for
# each pair of tokens, so the maps grow with the square.
#
# Fused attention (FlashAttention) never writes them out; the GPT of this course uses it, has no
# dropout here, and its exact account is `estimate.activation_bytes`.

# %% [markdown] knobs
# ## Turn the knobs
#
# Your functions as bars, under a capacity line: 7.5 billion parameters on 64 GPUs of 80 GiB. Add
# GPUs until stage 1 is hardly taller than its weights and gradients. Then grow the model until
# only stage 3 fits, and find the knobs that shrink what no stage divides.

# %% explorer
MemoryExplorer(psi=7.5e9, world_size=64, stage=0, precision="bf16", capacity="80GiB")

# %% [markdown] predict
# ## Predict, then measure
#
# Back to the model of the first cell, with all the memory that it wants. Commit to a number: put it
# in the place of `None` and run.

# %% predict-activations
lab.predict("1.5", None)

# %% [markdown] by-kind
# Now every kind: first the estimate, which runs nothing, then the ledger at the peak.


# %% estimated
def in_mib(by_kind):
    return "  ".join(f"{kind} {size / 2**20:.2f}" for kind, size in by_kind.items())


predicted = states.model_states(psi, lab.world_size(), 0)
predicted["activation"] = estimate.activation_bytes(shape, batch=8)
print("MiB:", in_mib(predicted))

# %% measured
run = lab.train(model="gpt-1m", micro_batch_size=8)
at_peak = run.fullest.peak_by_kind
print("MiB:", in_mib(at_peak))
print(f"activations: estimated {predicted['activation']:,}, measured {at_peak['activation']:,}")

# %% [markdown] not-a-sum
# The activations agree but for four bytes: backward has just begun, and one number of the loss is
# gone already. And at the peak there are no gradients: they come as the activations go. The peak of
# all is less than the sum of the peaks.

# %% [markdown] see-it
# ## See it come and go
#
# The same run, event by event, on every rank. Drag the moment through the first step: activations
# climb in forward and go in backward, and gradients come in their place. The line below says who
# allocated last. When does the optimizer state appear?

# %% timeline
MemoryTimeline(run)

# %% [markdown] see-it-fail
# And the run that died at the top of this page: how far did it come, and what did it ask for?

# %% timeline-failed
MemoryTimeline(lab.train(model="gpt-1m", micro_batch_size=8, gpu_memory="32MiB"))

# %% [markdown] last-measurement
# ## The answer
#
# The first step fitted, because Adam's averages appear only when the optimizer first runs. The
# second step found them there, and its forward did not fit any more.
#
# One more number to commit to. Then the same micro-batch at every stage, on the ledger.

# %% predict-stage-3
lab.predict("1.6", None)

# %% answer
for stage in (0, 1, 2, 3):
    run = lab.train(model="gpt-1m", stage=stage, micro_batch_size=8)
    print(f"stage {stage}: {run.peak_bytes / 2**20:.2f} MiB: {in_mib(run.fullest.peak_by_kind)}")
print(
    "fits 32 MiB at stage 1:",
    lab.train(model="gpt-1m", stage=1, micro_batch_size=8, gpu_memory="32MiB").fits,
)

# %% [markdown] answered
# The largest part is the activations, and no stage changes them: they belong to the *data* of a
# rank, not to the model. ZeRO made room beside them. What shrinks them is a smaller micro-batch, a
# shorter sequence, or checkpointing (chapter 09).
#
# Two more things to see. Stages 1 and 2 peak alike: at this peak there are no gradients yet, so
# dividing them saves nothing here. And `gathered` at stage 3 is the layer in use, put together from
# everybody's slices (chapter 06).

# %% [markdown] bridge-heading
# ## The same in PyTorch
#
# torch has relatives of three stages: `DistributedDataParallel` of stage 0, beside it
# `ZeroRedundancyOptimizer` of stage 1, and `fully_shard`, called FSDP2, of stage 3. Two processes
# that talk by gloo, torch's library for CPUs; fp32; and the bytes of torch's own tensors after a
# step, beside your estimate.

# %% torch-bytes
import zerolab
from zerolab import comm


def torch_model(way):
    """Return a GPT in one of torch's ways, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = gpt.GPT(shape)
    if way == "FSDP2":
        mesh = init_device_mesh("cpu", (comm.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters())
    model = DistributedDataParallel(model)
    if way == "DDP":
        return model, torch.optim.AdamW(model.parameters())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)


def torch_bytes(way):
    """Train one step; return the bytes a parameter that this rank holds, by kind."""
    model, optimizer = torch_model(way)
    tokens = torch.randint(256, (1, shape.seq_len))
    model(tokens, tokens).backward()
    optimizer.step()
    params = list(model.parameters())
    kept = getattr(optimizer, "optim", optimizer).state.values()
    found = {
        "param": params,
        "grad": [param.grad for param in params],
        "optimizer": [tensor for entry in kept for tensor in entry.values()],
    }
    own = {kind: [getattr(t, "_local_tensor", t) for t in found[kind]] for kind in found}
    return {kind: sum(t.nbytes for t in tensors) / psi for kind, tensors in own.items()}


for stage, way in ((0, "DDP"), (1, "ZeroRedundancyOptimizer"), (3, "FSDP2")):
    ours = states.model_states(psi, 2, stage, "fp32")
    words = "  ".join(f"{kind} {ours[kind] / psi:.2f}" for kind in ("param", "grad", "optimizer"))
    print(f"stage {stage}, your estimate:  {words}")
    for rank, held in enumerate(zerolab.run(torch_bytes, 2, "gloo", args=(way,), ledger=False)):
        words = "  ".join(f"{kind} {size:.2f}" for kind, size in held.items())
        print(f"  {way}, rank {rank}: {words} bytes a parameter")

# %% [markdown] bridge-why
# Two readings. In fp32 there is no clean copy, so the 16 bytes are 4 + 4 + 8.
# `ZeroRedundancyOptimizer` deals out whole parameters, so its halves need not be equal (chapter
# 04). These are the tensors that torch shows; DDP's buckets hold the gradients a second time,
# unless `gradient_as_bucket_view=True`.

# %% [markdown] deepspeed
# ## In DeepSpeed
#
# ```json
# {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1},
#  "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
# ```
#
# In a terminal, `zerolab estimate --psi 7.5 --gpus 64` prints the four stages, and `--config-out`
# writes a configuration.

# %% [markdown] interview
# ## In the interview
#
# *"How much memory does it take to train a model of Psi parameters?"*
#
# **30 seconds.** With AdamW and mixed precision 16 bytes a parameter: 2 weight, 2 gradient, 4
# master copy, 8 for Adam's averages. Activations come on top; they depend on tokens, layers and
# width, not on Psi. Stage 1 divides 12 of the 16 bytes by N, stage 2 divides 14, stage 3 all 16.
#
# **Two minutes.** Add: fp32 costs 16 bytes as well, so mixed precision does not shrink states. The
# saving of stage 1 is 16 / (4 + 12/N): below 4 for every N. Activations of a layer are about 34
# sbh + 5 a s²b bytes; fused attention removes the second term, checkpointing leaves 2 sbh. States
# and activations do not peak together: gradients grow while activations go. Then what estimates
# forget: buffers for what travels, the layer that stage 3 gathers, the allocator's cache and the
# CUDA context. So I would measure one step before I promise a batch size.
#
# **Follow-ups.** With SGD? With N = 3? With twice the micro-batch? Does 30B fit 8 GPUs at stage 3,
# as an article has it? Each is one call:

# %% follow-ups
print("SGD:", states.bytes_per_param("bf16", "sgd"))
print(f"stage 1 on 3 ranks: {states.saving_factor(1, 3):.2f} times smaller")
twice = [estimate.activation_bytes(shape, batch) for batch in (8, 16)]
print(f"twice the micro-batch: {twice[1] / twice[0]:.3f} times the activations")
held = states.model_state_bytes(30 * 10**9, 8, 3)
print(f"30B on 8 GPUs at stage 3: {held / 1e9:.0f} GB a GPU before the first activation")

# %% [markdown] quiz-heading
# ## Questions

# %% quiz
lab.quiz("01")

# %% [markdown] summary
# ## Where you are
#
# | | |
# |---|---|
# | **16 bytes a parameter** | mixed precision with AdamW, and fp32 with AdamW as well |
# | **stage 1, 2, 3** | divide 12, 14, 16 of them by N |
# | **4x, 8x** | limits of stages 1 and 2; put N in |
# | **activations** | grow with tokens; no stage divides them |
# | **peak** | less than the sum of all parts: they peak at different moments |
#
# The functions you wrote are the estimator of `zerolab estimate`. Chapter 02 asks what it costs to
# divide: who sends what to whom, and how long it takes.
