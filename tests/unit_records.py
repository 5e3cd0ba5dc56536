"""Records of stage 3 for the tests of pictures, written by hand."""

from zerolab.records import CollectiveEvent, Mark, MemoryEvent, Records

KIB = 1024


def gather(time, label, ended, phase="forward", op="all_gather"):
    """A call for one bucket of 1 KiB."""
    return CollectiveEvent(
        time, 0, op, 256, KIB, "float32", 2, "data", True, phase, "cell:1", label, ended=ended
    )


def memory(time, delta, block, kind="gathered", phase="forward"):
    return MemoryEvent(time, delta, 0, kind, block, "resize_", phase, "cell:1")


def root_and_block(*, freed=True):
    """The root waits; a block is gathered ahead, while an activation is born."""
    events = [memory(1.0, KIB, 7), memory(1.3, KIB, 8), memory(1.4, 512, 9, "activation")]
    events += [memory(1.6, -KIB, 8), memory(1.9, -KIB, 7)] if freed else []
    return Records(
        memory=events,
        collectives=[gather(1.1, "root/0", 1.2), gather(1.35, "blocks.0/0", 1.5)],
        marks=[Mark(0.5, "init_done", 0, {}, 0), Mark(2.0, "step_end", 0, {}, 0)],
    )


def many_units(count=24):
    """Every unit twice, one after the other: more moments than any chapter has."""
    calls, events = [], []
    for number in range(2 * count):
        events += [memory(1 + number, KIB, number), memory(1.9 + number, -KIB, number)]
        calls.append(gather(1.1 + number, f"blocks.{number % count}/0", 1.2 + number))
    marks = [Mark(0.5, "init_done", 0, {}, 0), Mark(3.0 * count, "step_end", 0, {}, 0)]
    return Records(memory=events, collectives=calls, marks=marks)
