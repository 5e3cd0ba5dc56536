"""Runs for the tests of pictures: records written by hand, small enough to check by eye."""

from types import SimpleNamespace

from zerolab.records import CollectiveEvent, Mark, MemoryEvent, Records

MIB = 2**20


def event(time, delta, total, kind, block, phase="forward", op="aten.mm", where="cell:1"):
    return MemoryEvent(time, delta, total, kind, block, op, phase, where)


def a_rank(rank=0, start=0.0):
    """Parameters, an activation known as one only in backward, a temporary that goes."""
    return Records(
        rank=rank,
        world_size=4,
        memory=[
            event(start + 0.1, 20 * MIB, 20 * MIB, "param", 0, "init"),
            event(start + 0.2, 30 * MIB, 50 * MIB, "temp", 1, where="cell:2"),
            event(start + 0.3, 5 * MIB, 55 * MIB, "temp", 2, where="cell:3", op="aten.gelu"),
            event(start + 0.4, -5 * MIB, 50 * MIB, "temp", 2, op="free", where=""),
            event(start + 0.5, -30 * MIB, 20 * MIB, "activation", 1, "backward", "free", ""),
            event(start + 0.6, 10 * MIB, 30 * MIB, "grad", 3, "backward", where="cell:4"),
        ],
        marks=[Mark(start + 0.55, "backward_end", 20 * MIB, {}, 55 * MIB)],
    )


def four_ranks():
    return [a_rank(rank, start=rank / 100) for rank in range(4)]


def out_of_memory():
    """What lab.train returns for such a run: rank 2 asked for 12 MiB too many, then freed."""
    error = MemoryError("CUDA out of memory. Tried to allocate 12.00 MiB. Of the allocated memory")
    vars(error).update(rank=2, requested=12 * MIB, allocated=30 * MIB, op="aten.mm", where="cell:5")
    failing = four_ranks()
    failing[2].memory.append(event(0.7, -30 * MIB, 0, "param", 0, "backward", "free", ""))
    ranks = [SimpleNamespace(rank=i, records=each) for i, each in enumerate(failing)]
    return SimpleNamespace(ranks=ranks, capacity=40 * MIB, error=error)


def call(time, op, ended, *, blocked=0.0, phase="backward", nbytes=MIB, seq=0, purpose="data"):
    made = CollectiveEvent(
        time, seq, op, nbytes // 4, nbytes, "float32", 2, purpose, True, phase, "cell:7", "bucket 0"
    )
    made.end(ended, blocked)
    return made


def a_step(rank=0, world="gloo"):
    """One second of training: one collective hidden for 0.2 of its 0.3 s, one exposed, a norm."""
    phases = [(0.1, "forward"), (0.3, "forward"), (0.4, "backward"), (0.55, "backward"),
              (0.8, "step")]  # fmt: skip
    ops = ["aten.mm", "aten.mm", "aten.mm", "aten._to_copy", "aten.add"]
    memory = [
        event(time, MIB, (i + 1) * MIB, "temp", i, phase, op)
        for i, ((time, phase), op) in enumerate(zip(phases, ops, strict=True))
    ]
    calls = [
        call(0.5, "reduce_scatter", 0.8, blocked=0.1, seq=0),
        call(0.82, "all_reduce", 0.84, blocked=0.02, seq=1, purpose="control", phase="step"),
        call(0.85, "all_gather", 0.95, blocked=0.1, seq=2, phase="step"),
    ]
    ends = [Mark(0.0, "init_done", 0, {}, 0), Mark(1.0, "step_end", 0, {}, 0)]
    return Records(rank, 2, memory, calls, ends, world=world)
