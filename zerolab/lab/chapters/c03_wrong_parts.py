"""Chapter 3: wrong answers to the parts and the blank. The docstring is the misconception.

Owns nothing. They run in the namespace of the module whose function they stand in for.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ... import comm
from ...config.triad import Triad

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


# 3.2 plan_buckets


def packs_in_forward_order(numels: Sequence[int], limit: int) -> list[list[int]]:
    """The first layer's gradient comes last: a bucket that begins with it is complete last."""
    buckets: list[list[int]] = []
    room = 0
    for position in range(len(numels)):
        if not buckets or numels[position] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(position)
        room -= numels[position]
    return buckets


def closes_when_exactly_full(numels: Sequence[int], limit: int) -> list[list[int]]:
    """A bucket that is filled to its limit is full, not too full: `>` and `>=` differ here."""
    buckets: list[list[int]] = []
    room = 0
    for position in reversed(range(len(numels))):
        if not buckets or numels[position] >= room:
            buckets.append([])
            room = limit
        buckets[-1].append(position)
        room -= numels[position]
    return buckets


def fills_holes(numels: Sequence[int], limit: int) -> list[list[int]]:
    """Room in an earlier bucket is tempting; but that bucket then waits for a late gradient."""
    buckets: list[list[int]] = []
    rooms: list[int] = []
    for position in reversed(range(len(numels))):
        fitting = [i for i, room in enumerate(rooms) if numels[position] <= room]
        if not fitting:
            buckets.append([])
            rooms.append(limit)
        place = fitting[0] if fitting else -1
        buckets[place].append(position)
        rooms[place] -= numels[position]
    return buckets


def drops_what_is_too_long(numels: Sequence[int], limit: int) -> list[list[int]]:
    """A tensor longer than the limit still needs to be reduced: it gets a bucket to itself."""
    buckets: list[list[int]] = [[]]
    room = limit
    for position in reversed(range(len(numels))):
        if numels[position] > limit:
            continue
        if numels[position] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(position)
        room -= numels[position]
    return [bucket for bucket in buckets if bucket]


def forgets_to_refill(numels: Sequence[int], limit: int) -> list[list[int]]:
    """A new bucket begins empty: the room that the tensors before took up is not taken in it."""
    buckets: list[list[int]] = [[]]
    room = limit
    for position in reversed(range(len(numels))):
        if numels[position] > room and buckets[-1]:
            buckets.append([])
        buckets[-1].append(position)
        room -= numels[position]
    return [bucket for bucket in buckets if bucket]


def one_tensor_a_bucket(numels: Sequence[int], limit: int) -> list[list[int]]:
    """A collective for every tensor is the fastest to start and pays its latency every time."""
    return [[position] for position in reversed(range(len(numels)))]


# 3.7 infer


def forgets_the_ranks(
    total: int | None, micro: int | None, accum: int | None, world_size: int
) -> Triad:
    """The total counts the samples of all ranks, not those of one."""
    if total is None:
        assert micro is not None
        return Triad(micro * (accum or 1), micro, accum or 1)
    if micro is not None:
        return Triad(total, micro, accum or total // micro)
    return Triad(total, total // (accum or 1), accum or 1)


def forgets_the_accumulation(
    total: int | None, micro: int | None, accum: int | None, world_size: int
) -> Triad:
    """A step of G micro-steps uses G micro-batches on each rank: divide by G as well as by N."""
    if total is None:
        assert micro is not None
        return Triad(micro * world_size, micro, accum or 1)
    if micro is not None:
        return Triad(total, micro, accum or total // micro // world_size)
    return Triad(total, total // world_size, accum or 1)


def rounds_up(total: int | None, micro: int | None, accum: int | None, world_size: int) -> Triad:
    """Rounding up trains on more samples a step than were asked for, and says nothing."""
    if total is None:
        assert micro is not None
        return Triad(micro * (accum or 1) * world_size, micro, accum or 1)
    if micro is not None:
        return Triad(total, micro, accum or -(-total // (micro * world_size)))
    return Triad(total, -(-total // (world_size * (accum or 1))), accum or 1)


def takes_micro_as_one(
    total: int | None, micro: int | None, accum: int | None, world_size: int
) -> Triad:
    """With the total alone, DeepSpeed accumulates nothing: G is 1, and micro is what is left."""
    if total is None:
        assert micro is not None
        return Triad(micro * (accum or 1) * world_size, micro, accum or 1)
    if micro is None and accum is None:
        return Triad(total, 1, total // world_size)
    if micro is not None:
        return Triad(total, micro, accum or total // micro // world_size)
    assert accum is not None
    return Triad(total, total // world_size // accum, accum)


def repairs_the_total(
    total: int | None, micro: int | None, accum: int | None, world_size: int
) -> Triad:
    """Three numbers that contradict each other are the user's mistake, not ours to decide."""
    if total is None or (micro and accum):
        assert micro is not None
        return Triad(micro * (accum or 1) * world_size, micro, accum or 1)
    if micro is not None:
        return Triad(total, micro, total // micro // world_size)
    return Triad(total, total // world_size // (accum or 1), accum or 1)


def at_least_one(total: int | None, micro: int | None, accum: int | None, world_size: int) -> Triad:
    """No accumulation fits a total this small. 1 would hide that; 0 is what `solves` refuses."""
    if total is None:
        assert micro is not None
        return Triad(micro * (accum or 1) * world_size, micro, accum or 1)
    if micro is not None:
        return Triad(total, micro, accum or max(total // micro // world_size, 1))
    return Triad(total, total // world_size // (accum or 1), accum or 1)


# 3.1 train_data_parallel


class _Flat:
    """One buffer for all gradients, which starts its reduction in the last hook, or later."""

    def __init__(self, params: list[nn.Parameter], op: str, *, early: bool) -> None:
        self.params, self.op, self.early = params, op, early
        numels = [param.numel() for param in params]
        self.grad = torch.zeros(sum(numels))
        for param, piece in zip(params, self.grad.split(numels), strict=True):
            param.grad = piece.view_as(param)
        self.missing: set[torch.Tensor] = set()
        self.works: list[comm.Work] = []
        self.hooks = [param.register_post_accumulate_grad_hook(self.ready) for param in params]

    def reduce(self) -> None:
        self.works.append(comm.all_reduce(self.grad, self.op, async_op=True))

    def ready(self, param: torch.Tensor) -> None:
        self.missing.discard(param)
        if self.early and not self.missing:
            self.reduce()

    def finish(self) -> None:
        if self.missing or not self.early:
            self.reduce()

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def _train(
    model: nn.Module,
    batches: Batches,
    make_optimizer: Callable[..., Any],
    *,
    op: str = "avg",
    early: bool = True,
    stale: bool = False,
    patient: bool = False,
) -> _Flat:
    """Train with one thing or another done wrongly."""
    params = list(model.parameters())
    flat_grad = _Flat(params, op, early=early)
    optimizer = make_optimizer(params)
    for inputs, targets in batches:
        if not stale:
            flat_grad.grad.zero_()
        flat_grad.missing.update(params)
        F.mse_loss(model(inputs), targets).backward()
        if not patient:
            flat_grad.finish()
        flat_grad.wait()
        optimizer.step()
    return flat_grad


def _agree(model: nn.Module) -> None:
    for param in model.parameters():
        comm.broadcast(param.data, src=0, purpose="control")


def trusts_the_seed(model: nn.Module, batches: Batches, make_optimizer: Callable[..., Any]) -> None:
    """Equal gradients move weights in parallel: ranks that begin apart stay apart for ever."""
    _train(model, batches, make_optimizer).remove()


def sums(model: nn.Module, batches: Batches, make_optimizer: Callable[..., Any]) -> None:
    """The loss is a mean over the global batch, so gradients are averaged: a sum is N times it."""
    _agree(model)
    _train(model, batches, make_optimizer, op="sum").remove()


def reduces_after_backward(
    model: nn.Module, batches: Batches, make_optimizer: Callable[..., Any]
) -> None:
    """Right, and nothing overlaps: the network idles in backward, the processor afterwards."""
    _agree(model)
    _train(model, batches, make_optimizer, early=False).remove()


def never_clears(model: nn.Module, batches: Batches, make_optimizer: Callable[..., Any]) -> None:
    """Backward adds to what is there: the last step's mean would be reduced a second time."""
    _agree(model)
    _train(model, batches, make_optimizer, stale=True).remove()


def leaves_its_hooks(
    model: nn.Module, batches: Batches, make_optimizer: Callable[..., Any]
) -> None:
    """A hook lives as long as the parameter: whoever runs backward next sends gradients again."""
    _agree(model)
    _train(model, batches, make_optimizer)


def one_call_a_parameter(
    model: nn.Module, batches: Batches, make_optimizer: Callable[..., Any]
) -> None:
    """Five small collectives move as much as one large one, and pay the latency five times."""
    params = list(model.parameters())
    for param in params:
        comm.broadcast(param.data, src=0, purpose="control")
    optimizer = make_optimizer(params)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            comm.all_reduce(param.grad, "avg")
        optimizer.step()


def copies_into_a_buffer(
    model: nn.Module, batches: Batches, make_optimizer: Callable[..., Any]
) -> None:
    """Gradients and a flat copy of them are twice the bytes: views cost nothing."""
    params = list(model.parameters())
    flat_grad = torch.zeros(sum(param.numel() for param in params))
    for param in params:
        comm.broadcast(param.data, src=0, purpose="control")
    missing: set[torch.Tensor] = set()
    works: list[comm.Work] = []

    def pack(param: torch.Tensor | None = None) -> None:
        missing.discard(param) if param is not None else missing.clear()
        if not missing:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            torch.cat([grad.reshape(-1) for grad in grads], out=flat_grad)
            works.append(comm.all_reduce(flat_grad, "avg", async_op=True))

    hooks = [param.register_post_accumulate_grad_hook(pack) for param in params]
    optimizer = make_optimizer(params)
    for inputs, targets in batches:
        missing.update(params)
        F.mse_loss(model(inputs), targets).backward()
        if missing:
            pack()
        works.pop().wait()
        start = 0
        for param in params:
            param.grad = flat_grad[start : start + param.numel()].view_as(param).clone()
            start += param.numel()
        optimizer.step()
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()


def waits_for_a_hook(
    model: nn.Module, batches: Batches, make_optimizer: Callable[..., Any]
) -> None:
    """An unused parameter has no gradient and its hook never comes; the other ranks still wait."""
    _agree(model)
    _train(model, batches, make_optimizer, patient=True).remove()


def tells_the_weights_every_step(
    model: nn.Module, batches: Batches, make_optimizer: Callable[..., Any]
) -> None:
    """Weights that begin equal and get equal updates stay equal: sending them is traffic twice."""

    def told() -> "Batches":
        for pair in batches:
            _agree(model)
            yield pair

    _train(model, told(), make_optimizer).remove()
