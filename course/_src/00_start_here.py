# %% [markdown] title
# # Start here
#
# [Open in Colab](https://colab.research.google.com/github/{repository}/blob/main/course/00_start_here.ipynb)
#
# **Press Shift+Enter until bars appear: four virtual GPUs of 160 MiB start to train a GPT.**
#
# *Estimated 30 minutes.*

# %% colab tags=colab hidden
# On Colab this fetches zerolab and leaves Colab's own torch alone; elsewhere it does nothing.
import subprocess
import sys

if "google.colab" in sys.modules:
    address, folder = "https://github.com/{repository}", "/content/zerolab"
    subprocess.run(["git", "clone", "-q", "--depth=1", address, folder], check=True)
    small = ["anywidget>=0.9.18", "hjson>=3.1", "cloudpickle>=3.1"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *small], check=True)
    sys.path[:0] = [folder, f"{folder}/widgets"]

# %% first-run
import zerolab
from zerolab import comm, lab
from zerolab_widgets import MemoryBars

lab.begin("00")
lab.train(stage=0, gpu_memory="160MiB", watch=MemoryBars())

# %% [markdown] out-of-memory
# ## One rank is full, and the run dies
#
# Each GPU is driven by its own copy of the program, a *rank*: a process, on this page a thread. The
# model has 10.8 million parameters of 2 bytes: 21 MiB.
# Click the largest part of the red bar and read what it is. Drag the slider to see it come.

# %% stage-1
lab.train(stage=1, gpu_memory="160MiB", watch=MemoryBars())

# %% [markdown] why
# ## One number changed, and it fits
#
# Compare the bars. What became a quarter, and what stayed?


# %% hello tags=nbval-check-output
def hello():
    return f"rank {comm.get_rank()} of {comm.get_world_size()}"


zerolab.run(hello, world_size=lab.world_size())

# %% [markdown] your-turn
# ## Your turn: who owns what?
#
# Every rank runs this same program and knows its number. At stage 1 each one keeps optimizer
# state for its own slice of the parameters. Slices are equally long, so the end is padded.
# 10 elements on 4 ranks:
#
# | rank | 0 | 1 | 2 | 3 |
# |---|---|---|---|---|
# | `(start, stop)` | `(0, 3)` | `(3, 6)` | `(6, 9)` | `(9, 12)` |
#
# Replace the last line of the function, then run the cell. `padded_numel(10, 4)` gives 12.
# Stuck? `lab.hint("0.1")`. *About 4 minutes.*

# %% exercise zerolab.flat:shard_bounds
lab.check("0.1", shard_bounds)

# %% [markdown] on-yours
# ## The engine runs on your function
#
# Run stage 1 again, on your slices. Then give every rank its neighbour's slice, and watch.

# %% stage-1-yours
yours = lab.train(stage=1, gpu_memory="160MiB")
yours

# %% shifted
mine = lab.running("zerolab.flat:shard_bounds")


def shifted(numel, world_size, rank):
    return mine(numel, world_size, (rank + 1) % world_size)


with lab.plugged("zerolab.flat:shard_bounds", shifted):
    wrong = lab.train(stage=1, gpu_memory="160MiB")
wrong

# %% [markdown] saved
# No error, the same bytes, and it hardly learns: so checks here look at bytes, traffic *and*
# weights. Saved: your function is in this notebook, and from now on in the engine. The next
# question: every rank still holds all parameters and all gradients. Must it?

# %% [markdown] four-stages
# ## The four stages, side by side
#
# The same model, the same data, and room enough. Stage 0 shards nothing, stage 1 the optimizer
# state (with the fp32 *master weights* it updates), stage 2 also the gradients, stage 3 also the
# parameters, which it gathers block by block when they are needed.

# %% side-by-side
runs = [lab.train(stage=0), yours, lab.train(stage=2), lab.train(stage=3)]
lab.compare(*runs)

# %% [markdown] read-the-table
# Three things to read here.
#
# - **Bytes.** Parameters and gradients take 2 bytes each, master weights 4, Adam's two averages 8:
#   16 bytes a parameter at stage 0. Which columns shrink to a quarter, and at which stage?
# - **Traffic.** Stage 0 all-reduces every gradient, which counts as two passes over the model.
#   Stages 1 and 2 reduce-scatter gradients and all-gather parameters: two passes as well, so
#   sharding is free here. Stage 3 gathers the parameters twice, for forward and for backward, and
#   reduces gradients once: three.
# - **Losses.** In this engine all stages compute the same, bit for bit. Sharding decides who keeps
#   what, not what is computed.

# %% peaks
from zerolab_widgets.bars import Bar

tallest = [Bar(f"stage {run.job.stage}", run.fullest.peak_by_kind, run.peak_bytes) for run in runs]
MemoryBars.of_bars(tallest, capacity=160 * 2**20)

# %% [markdown] ladder
# ## The ladder of ceilings
#
# Each bar is the fullest moment of one stage. **Pull the ceiling down with the slider:** every
# stage runs out of memory somewhere, and the next one still fits below. So far that is
# arithmetic with what was measured. Now let it happen: halfway between two stages, run both.

# %% rungs
for above, below in [(1, 2), (2, 3)]:
    ceiling = (runs[above].peak_bytes + runs[below].peak_bytes) // 2
    for stage in (above, below):
        run = lab.train(stage=stage, gpu_memory=ceiling)
        verdict = "fits" if run.fits else "out of memory"
        print(f"{ceiling / 2**20:.1f} MiB, stage {stage}: {verdict}")

# %% [markdown] whole-loop
# ## The whole training loop
#
# This is what each rank ran, all of it. Nothing in it says how many ranks there are, nor which
# stage it is: that stands in the configuration, which has the format of DeepSpeed's
# `ds_config.json`.

# %% the-loop
import inspect

from zerolab.lab.training import train_rank

print(inspect.getsource(train_rank))

# %% [markdown] padding
# ## Your turn: how long is the buffer?
#
# Your `shard_bounds` called `padded_numel`: the smallest multiple of the world size that holds all
# elements. Write that one too. *About 5 minutes;* `lab.hint("0.2")` helps.

# %% exercise zerolab.flat:padded_numel
lab.check("0.2", padded_numel)

# %% [markdown] self-test
# ## What the course assumes
#
# A training loop in PyTorch, and nothing about several GPUs. Five questions to find out. Read
# them, then write your letters into the second cell.

# %% questions
lab.self_test()

# %% answers
lab.self_test("?", "?", "?", "?", "?")

# %% [markdown] next
# ## Where you are
#
# | | |
# |---|---|
# | **rank** | one of the copies of the program that train together; it knows its number |
# | **stage 0, 1, 2, 3** | nothing, optimizer state, also gradients, also parameters sharded |
# | **shard** | the slice of a flat, padded buffer that one rank owns |
# | **16 bytes a parameter** | 2 parameter, 2 gradient, 4 master, 8 optimizer |
#
# You wrote the two functions that decide who owns what; the engine uses them at every stage.
# Chapter 01 asks where the rest of the memory goes, and lets you predict a number before the
# ledger shows it.
