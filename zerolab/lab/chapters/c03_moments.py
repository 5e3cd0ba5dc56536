"""Chapter 3: the checks of the moments: what a run of the engine shows of each.

Owns when which bucket has to leave. References are plain torch in one process with the batches
of all ranks, and the order in which backward reaches the layers.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import device, engine
from ...bucket import Bucket
from .. import evidence
from ..outcome import Wrong
from . import c03_runs as runs
from . import c04_checks

Function = Callable[..., Any]
Ranks = list[list[runs.Step]]
LABELS = tuple(f"root/{number}" for number in range(runs.NUM_LAYERS))
# When the first gradient of a layer comes: how many buckets have been sent, and are under way.
SENT = (
    {"last": 0, "right": 1, "left": 2, "first": 3},
    {"last": 0, "rare": 1, "left": 1, "right": 1, "first": 3},
    {"last": 0, "right": 1, "left": 2, "first": 3},
)


# Two layers a bucket, in the second of two micro-steps.
WIDE = runs.Case(accum=2, limit=2 * runs.LAYER)
WIDE_LABELS = LABELS[:3]
SENT_WIDE = (
    {"last": 0, "right": 0, "left": 1, "first": 1},
    {"last": 0, "rare": 0, "left": 0, "right": 0, "first": 1},
    {"last": 0, "right": 0, "left": 1, "first": 1},
)


# What the moments show in the engine.


def check_sent(ranks: Ranks, right: Sequence[dict[str, int]] = SENT) -> None:
    """When the first gradient of a layer comes, so many buckets have been sent."""
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            expected = right[rank]
            if step.sent != expected:
                layer = next(n for n in expected if step.sent.get(n) != expected[n])
                raise Wrong(
                    f"Step {number}: when the first gradient of layer {layer!r} came, "
                    f"{step.sent.get(layer, 0)} buckets had been sent, and {expected[layer]} are "
                    "right.",
                    expected=expected,
                    observed=step.sent,
                    call="one backward of five layers",
                    rank=rank,
                )


def _check_under_way(ranks: Ranks) -> None:
    """What has been sent is not waited for while backward runs."""
    for rank, steps in enumerate(ranks):
        for step in steps:
            for layer, sent in SENT[rank].items():
                flying = step.under_way.get(layer, 0)
                if flying == sent:
                    continue
                raise Wrong(
                    f"When the first gradient of layer {layer!r} came, {sent} reductions had been "
                    f"sent and {flying} were under way: the others had been waited for, and "
                    "backward with them.",
                    expected=SENT[rank],
                    observed=step.under_way,
                    call="one backward of five layers",
                    rank=rank,
                )


def _check_order(ranks: Ranks, labels: tuple[str, ...] = LABELS) -> None:
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            if step.order != labels:
                raise Wrong(
                    f"Step {number}: {len(step.order)} reductions were sent, and "
                    f"{len(labels)} are right, in index order.",
                    expected=labels,
                    observed=step.order,
                    call="one step",
                    rank=rank,
                )


def check_grads(ranks: Ranks, case: runs.Case) -> None:
    """Compare the means with plain torch, parameter by parameter, in every step."""
    for number, expected in enumerate(runs.alone(case)):
        for rank, steps in enumerate(ranks):
            grads = steps[number].grads if number < len(steps) else {}
            for name, reference in expected.items():
                _check_grad(number, rank, name, grads.get(name), reference)


def _check_grad(
    number: int, rank: int, name: str, mean: torch.Tensor | None, reference: torch.Tensor
) -> None:
    if mean is None:
        raise Wrong(
            f"Step {number}: the gradient of {name} was not received before the update.",
            expected="a mean over the ranks",
            observed="nothing",
            call="one step",
            rank=rank,
        )
    apart = (mean.float().cpu() - reference).abs().max().item()
    if math.isnan(apart):
        raise Wrong(
            f"Step {number}: the gradient of {name} is NaN. So is a tensor whose reduction is on "
            "its way, and a buffer that was never filled.",
            expected="a mean over the ranks",
            observed="NaN",
            call="one step",
            rank=rank,
        )
    if not apart <= runs.TOLERANCE:
        ratio = (mean.double().norm().cpu() / reference.double().norm()).item()
        raise Wrong(
            f"Step {number}: the gradient of {name} is off by {apart:.2g}, its length "
            f"{ratio:.2f} times that of one process with all batches.",
            expected=f"off by at most {runs.TOLERANCE:g}",
            observed=f"{apart:.2g}",
            call="one step",
            rank=rank,
        )


def _check_held(ranks: Ranks, expected: int, call: str) -> None:
    for rank, steps in enumerate(ranks):
        for step in steps:
            if step.held["grad"] != expected:
                raise Wrong(
                    f"Before the update a rank holds {step.held['grad']} bytes of gradients, and "
                    f'{expected} are right: they wait in fp32, and count as "grad".',
                    expected=f"{expected} bytes",
                    observed=f"{step.held['grad']} bytes",
                    call=call,
                    rank=rank,
                )


def _check_waiting(ranks: Ranks) -> None:
    for rank, steps in enumerate(ranks):
        layers = runs.NUM_LAYERS - (rank != 1)  # one layer is used by rank 1 alone
        expected = 4 * runs.PADDED * layers
        for step in steps:
            if step.waiting != expected:
                raise Wrong(
                    f"Between two micro-steps {step.waiting} bytes are counted as gradients; "
                    f"the buffers of {layers} buckets take {expected}. `kind` says how they count.",
                    expected=f"{expected} bytes",
                    observed=f"{step.waiting} bytes",
                    call="two micro-steps",
                    rank=rank,
                )


def _check_left(ranks: Ranks) -> None:
    for rank, steps in enumerate(ranks):
        if steps[0].left:
            raise Wrong(
                f"After backward {len(steps[0].left)} parameters still have a `.grad` of their "
                "own, beside their place in the bucket: twice the bytes, and the next backward "
                "adds to it.",
                expected="every `.grad` is None",
                observed=steps[0].left,
                call="one backward of five layers",
                rank=rank,
            )


# 3.3 collect


def check_collect(answer: Function) -> Iterator[str]:
    """Gradients of several steps, accumulated ones, order, bytes."""
    _check_buffer(answer)
    ranks = runs.watch(runs.Case())
    _check_left(ranks)
    yield "after backward no parameter has a gradient of its own"
    check_sent(ranks)
    yield "each bucket leaves as soon as its last gradient is there"
    check_grads(ranks, runs.Case())
    yield f"gradients of {runs.STEPS} steps on {runs.WORLD_SIZE} ranks: those of plain torch"
    case = runs.Case(accum=2, reuse=True)
    ranks = runs.watch(case)
    check_grads(ranks, case)
    _check_waiting(ranks)
    yield "two micro-steps: the second gradient is added to the first"
    _check_states(ranks)
    yield "a bucket is FILLING with its first gradient, and stays IN_FLIGHT while it travels"
    ranks = runs.watch(runs.Case(dtype="bf16", accum=2, reduce="micro_step"))
    _check_held(ranks, 4 * runs.PADDED * runs.NUM_LAYERS, "two micro-steps in bf16")
    _check_states(ranks)
    yield "bf16 gradients wait in fp32 where that is asked for: bytes held"
    _check_notes(answer)
    yield "a bucket by itself: which slots it notes, in three sets"
    _check_sparse()
    yield "a sparse gradient of an embedding finds its place"


@contextlib.contextmanager
def _empty_is_nan() -> Iterator[None]:
    """Let `torch.empty` give NaN in the block, where otherwise anything may lie, zeros too."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def _collected(answer: Function, kind: str) -> tuple[Bucket, dict[str, int]]:
    """Let the second of a bucket's two gradients be collected; return the bucket and the bytes."""
    bucket = c04_checks.make_bucket((16, 3), 2, 0, [0])
    with _empty_is_nan(), device.VirtualGPU() as gpu:
        with device.tag("temp"):
            bucket.slots[1].param.grad = torch.ones(3)
        answer(bucket, 1, torch.float32, kind)
        held = {kind: nbytes for kind, nbytes in gpu.by_kind().items() if nbytes}
    return bucket, held


def _check_buffer(answer: Function) -> None:
    """The buffer is as long as the bucket with its padding, and counts as it was told."""
    for kind in ("grad", "bucket"):
        bucket, held = _collected(answer, kind)
        numel = 0 if bucket.fresh is None else bucket.fresh.numel()
        if numel != bucket.padded_numel:
            raise Wrong(
                f"A bucket of 16 + 3 elements on 2 ranks: `fresh` has {numel} elements. It is sent "
                f"as it is, and every rank sends {bucket.padded_numel}, padding included.",
                expected=f"{bucket.padded_numel} elements",
                observed=f"{numel} elements",
                call=f"collect(bucket, 1, torch.float32, {kind!r})",
            )
        _check_first(bucket)
        if not held.get(kind) and set(held) - {"temp", "input"}:
            raise Wrong(
                f"The buffer was to count as {kind!r}; the ledger has {held}.",
                expected={kind: 4 * numel},
                observed=held,
                call=f"collect(bucket, 1, torch.float32, {kind!r})",
            )


def _check_first(bucket: Bucket) -> None:
    found = [] if bucket.fresh is None else bucket.fresh[16:19].tolist()
    if any(map(math.isnan, found)):
        raise Wrong(
            "The first gradient of slot 1 is [1, 1, 1], and the buffer now holds NaN there. What "
            "`torch.empty` gives holds anything: the first gradient is put there, not added.",
            expected=[1.0, 1.0, 1.0],
            observed=found,
            call="collect(bucket, 1, torch.float32, 'grad')",
        )


def _check_notes(answer: Function) -> None:
    bucket, _ = _collected(answer, "grad")
    notes = {"filled": bucket.filled, "arrived": bucket.arrived, "used": bucket.used}
    for name, noted in notes.items():
        if noted != {1}:
            raise Wrong(
                f"The gradient of slot 1 has come, and `bucket.{name}` is {noted or '{}'}.",
                expected="{1}",
                observed=f"{noted or '{}'}",
                call="collect(bucket, 1, torch.float32, 'grad')",
            )


def _check_states(ranks: Ranks) -> None:
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            for one in step.astray:
                late = one.expected == "in flight"
                when = "while its mean was on its way" if late else "and it has not been sent"
                until = "`receive` has the mean" if late else "it is sent"
                raise Wrong(
                    f"Step {number}: bucket {one.bucket} has got a gradient {when}, and its state "
                    f"is now {one.found}. It is {one.expected} until {until}.",
                    expected=one.expected,
                    observed=one.found,
                    call="collect(bucket, position, dtype, kind)",
                    rank=rank,
                )


def _sparse() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of an embedding's gradient [15] as the engine has it, and what is right."""
    torch.manual_seed(5)
    model = nn.Embedding(5, 3, sparse=True).to(evidence.home())
    words = torch.tensor([1, 3, 3], device=evidence.home())
    weight = model.weight.detach().clone().requires_grad_()
    F.embedding(words, weight).pow(2).sum().backward()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": runs.OPTIMIZER},
    }
    trainer, *_ = engine.initialize(model=model, config=config)
    trainer.backward(trainer(words).pow(2).sum())
    reduced = trainer.sharding.trainable[0].reduced
    assert reduced is not None and weight.grad is not None
    found = reduced[: weight.numel()].cpu().clone()
    trainer.close()
    return found, weight.grad.flatten().cpu()


def _check_sparse() -> None:
    found, expected = evidence.run(_sparse, 1)[0]
    if not torch.allclose(found, expected, atol=runs.TOLERANCE):
        raise Wrong(
            "An embedding's sparse gradient has not come to its place in the buffer.",
            expected=", ".join(f"{x:.3g}" for x in expected.tolist()),
            observed=", ".join(f"{x:.3g}" for x in found.tolist()),
            call="one backward of an embedding, sparse=True",
        )


# 3.4 post_backward


def check_post_backward(answer: Function) -> Iterator[str]:
    """When each bucket leaves, in which order on which rank, and what comes of it."""
    ranks = runs.watch(runs.Case())
    check_sent(ranks)
    yield "each bucket leaves as soon as its turn has come, while backward runs on"
    _check_under_way(ranks)
    yield "what was sent is under way while the next gradients are computed"
    _check_order(ranks)
    yield "on each rank the same order, though gradients come in another order on rank 1"
    check_grads(ranks, runs.Case())
    yield f"gradients of {runs.STEPS} steps on {runs.WORLD_SIZE} ranks: those of plain torch"
    _check_in_backward(ranks)
    yield "the last bucket leaves with the last gradient, not at the end"
    ranks = runs.watch(WIDE)
    check_sent(ranks, SENT_WIDE)
    _check_order(ranks, WIDE_LABELS)
    yield "two layers a bucket, two micro-steps: what came in this backward alone makes it complete"


def _check_in_backward(ranks: Ranks) -> None:
    """Every bucket that a rank completes has left when backward is over."""
    for rank, steps in enumerate(ranks):
        complete = runs.NUM_LAYERS - (rank != 1)  # the last bucket belongs to rank 1 alone
        for number, step in enumerate(steps):
            if step.in_backward != complete:
                raise Wrong(
                    f"Step {number}: all gradients of {complete} buckets had come, and when "
                    f"backward was over {step.in_backward} had been sent.",
                    expected=f"{complete} buckets sent in backward",
                    observed=f"{step.in_backward} buckets",
                    call="one backward of five layers",
                    rank=rank,
                )


# 3.5 finish_backward


def check_finish_backward(answer: Function) -> Iterator[str]:
    """What is sent at the end, also by ranks that have nothing to say; then the next step."""
    ranks = runs.watch(runs.Case())
    _check_order(ranks)
    yield "every bucket is sent once, also the one that only rank 1 has gradients for"
    check_sent(ranks)
    check_grads(ranks, runs.Case())
    yield f"gradients of {runs.STEPS} steps on {runs.WORLD_SIZE} ranks: those of plain torch"
    case = runs.Case(accum=2, rare_last=True)
    ranks = runs.watch(case)
    _check_order(ranks)
    check_grads(ranks, case)
    yield "two micro-steps: nothing moves in the first, everything once in the second"
    _check_together(ranks)
    yield "where the first bucket waits for its gradients, all leave at the end, in index order"
    case = runs.Case(reuse=True)
    ranks = runs.watch(case)
    check_grads(ranks, case)
    yield "a gradient that came on rank 1 after its bucket had left waits for the next round"


def _check_together(ranks: Ranks) -> None:
    """What is left is sent first, and then waited for."""
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            if step.waited:
                raise Wrong(
                    f"Step {number}: {step.waited} reductions were waited for before the next one "
                    "was sent. Send all that are left, and wait then: so they overlap.",
                    expected="all sent, then all waited for",
                    observed=f"{step.waited} waited for one by one",
                    call="one step",
                    rank=rank,
                )


# 3.6 receive


def _check_reduced(ranks: Ranks) -> None:
    for rank, steps in enumerate(ranks):
        for name, state in steps[0].states.items():
            if state != "reduced":
                raise Wrong(
                    f"The mean of bucket {name} has come and nothing came meanwhile, and its "
                    f"state is {state}.",
                    expected="reduced",
                    observed=state,
                    call="one step",
                    rank=rank,
                )


def check_receive(answer: Function) -> Iterator[str]:
    """Values, with and without accumulation; bytes; what a bucket lets go of."""
    ranks = runs.watch(runs.Case())
    check_grads(ranks, runs.Case())
    yield f"gradients of {runs.STEPS} steps on {runs.WORLD_SIZE} ranks: those of plain torch"
    for rank, steps in enumerate(ranks):
        if steps[0].loose:
            raise Wrong(
                f"{len(steps[0].loose)} buckets still hold on to a collective that has ended: "
                f"{', '.join(steps[0].loose)}.",
                expected="`work` and `incoming` are None",
                observed=steps[0].loose,
                call="one step",
                rank=rank,
            )
    yield "a received bucket lets go of the handle and of the buffer that travelled"
    _check_reduced(ranks)
    yield "and is REDUCED: its mean waits for the update"
    case = runs.Case(accum=2, reduce="micro_step")
    ranks = runs.watch(case)
    check_grads(ranks, case)
    _check_held(ranks, 4 * runs.PADDED * runs.NUM_LAYERS, "two micro-steps, each reduced")
    yield "reduced in every micro-step, the means add up, in the memory of the first"
    case = runs.Case(reuse=True)
    check_grads(runs.watch(case), case)
    yield "a bucket that has got a gradient meanwhile is FILLING, and is sent once more"
    case = runs.Case(dtype="bf16", travel="bf16")
    held = 4 * runs.PADDED * runs.NUM_LAYERS
    _check_held(runs.watch(case), held, "one step with two dtypes")
    yield "means that have travelled in bf16 are kept in fp32: bytes held"
