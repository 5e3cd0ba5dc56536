"""Runs a case (tests/cases) on plain torch, on DistributedDataParallel and on the engine.

A case talks to a small api: setup, call, backward, step, mean, local, result. The plain one is
the reference: one process, the whole batch. The others give every rank its contiguous slice.
"""

import importlib.util
import math
from pathlib import Path
from typing import ClassVar

import torch

import zerolab
from zerolab import comm

CASES = sorted((Path(__file__).parent / "cases").glob("case_*.py"))
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adam": torch.optim.Adam}
DEFAULT_OPT = ("adamw", {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-5, "weight_decay": 0.05})


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shard(thing, batch_size, rank, world):
    """The rank's contiguous slice of every tensor whose first dimension is the batch."""
    if isinstance(thing, torch.Tensor):
        batched = thing.dim() >= 1 and thing.shape[0] == batch_size
        return thing.tensor_split(world)[rank].contiguous() if batched else thing
    if isinstance(thing, dict):
        return {key: shard(value, batch_size, rank, world) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return type(thing)(shard(value, batch_size, rank, world) for value in thing)
    return thing


def densify(grad):
    return grad.to_dense() if grad.is_sparse else grad


class PlainAPI:
    """One process, the whole batch."""

    rank, world = 0, 1

    def __init__(self, config=None):
        self.config = dict(config or {})

    def setup(self, model, opt_spec, groups, config=None):
        self.model, self.cfg = model, {**self.config, **(config or {})}
        self.accum, self.clip = self.cfg.get("gas", 1), self.cfg.get("clip", 0.0)
        name, arguments = opt_spec
        self.opt = OPTIMIZERS[name](groups, **arguments)
        self.micro, self.last_norm = 0, None
        self.net = self.wrap(model)

    def wrap(self, model):
        return model

    def __call__(self, *args, **kwargs):
        return self.net(*args, **kwargs)

    def train(self):
        self.model.train()

    def eval(self):
        self.model.eval()

    def backward(self, loss, **kwargs):
        (loss / self.accum).backward(**kwargs)

    def step(self):
        self.micro += 1
        if self.micro % self.accum:
            return
        params = [p for group in self.opt.param_groups for p in group["params"]]
        grads = [densify(p.grad) for p in params if p.grad is not None]
        self.last_norm = None
        if all(torch.isfinite(grad).all() for grad in grads):
            squares = [grad.double().square().sum() for grad in grads]
            self.last_norm = math.sqrt(sum(squares)) if grads else 0.0
            if self.clip:
                torch.nn.utils.clip_grad_norm_(params, self.clip)
            self.opt.step()
        self.opt.zero_grad(set_to_none=True)

    def local(self, micro, batch_size):
        return shard(micro, batch_size, self.rank, self.world)

    def mean(self, value):
        return float(value)

    def full_params(self):
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: param.detach().clone() for name, param in named}

    def state(self):
        return {"model": self.model.state_dict(), "opt": self.opt.state_dict()}

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])

    def result(self, losses=(), norms=(), **extra):
        return {
            "params": self.full_params(),
            "losses": list(losses),
            "norms": list(norms),
            "extra": extra,
        }


class RanksAPI(PlainAPI):
    """What engines on several ranks have in common."""

    def setup(self, model, opt_spec, groups, config=None):
        self.rank, self.world = comm.get_rank(), comm.get_world_size()
        super().setup(model, opt_spec, groups, config)

    def mean(self, value):
        own = torch.tensor([float(value)], dtype=torch.float64)
        comm.all_reduce(own, "avg", purpose="control")
        return float(own)


class DDPAPI(RanksAPI):
    """torch's DistributedDataParallel, in gloo ranks."""

    def wrap(self, model):
        wrapper = torch.nn.parallel.DistributedDataParallel
        return wrapper(model, find_unused_parameters=self.cfg.get("find_unused", False))


class EngineAPI(RanksAPI):
    """zerolab at one stage."""

    stage = 0
    more: ClassVar[dict] = {}

    def wrap(self, model):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accum,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 40},
        }
        engine, *_ = zerolab.initialize(
            model=model, optimizer=self.opt, config=_merge(config, self.more)
        )
        return engine

    def backward(self, loss, **kwargs):
        self.net.backward(loss, **kwargs)

    def step(self):
        self.net.step()
        self.last_norm = self.net.get_global_grad_norm()

    def full_params(self):
        whole = {}
        for bucket in self.net.sharding.buckets:
            full = torch.empty(bucket.padded_numel, dtype=bucket.dtype)
            comm.all_gather(full, bucket.shard.clone(), purpose="control")
            for slot in bucket.slots:
                values = full[slot.offset : slot.offset + slot.numel]
                whole[id(slot.param)] = values.view(slot.shape).clone()
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: whole[id(param)] for name, param in named}

    def state(self):
        """Every tensor this rank holds, by name: enough to go on at the same world size."""
        buckets = self.net.sharding.buckets
        return {
            "shards": [bucket.shard.clone() for bucket in buckets],
            "moments": [
                {key: value.clone() for key, value in self.opt.state[segment.param].items()}
                for bucket in self.net.sharding.trainable
                for segment in bucket.segments
            ],
        }

    def load(self, state):
        segments = [s for b in self.net.sharding.trainable for s in b.segments]
        for segment, moments in zip(segments, state["moments"], strict=True):
            self.opt.state[segment.param] = moments
        with torch.no_grad():
            for bucket, saved in zip(self.net.sharding.buckets, state["shards"], strict=True):
                bucket.shard.copy_(saved)
                if self.stage < 3:
                    comm.all_gather(bucket.flat_param, bucket.shard, purpose="control")


def _merge(config, more):
    merged = dict(config)
    for key, value in more.items():
        merged[key] = {**merged[key], **value} if isinstance(merged.get(key), dict) else value
    return merged


def default_run(case, api, model, inputs):
    groups = case.param_groups(model) if hasattr(case, "param_groups") else list(model.parameters())
    api.setup(model, getattr(case, "OPT", DEFAULT_OPT), groups, getattr(case, "CONFIG", {}))
    losses, norms = [], []
    for micros in inputs["steps"]:
        total = 0.0
        for micro in micros:
            mine = api.local(micro, inputs["B"])
            out = api(*mine.get("args", ()), **mine.get("kwargs", {}))
            loss = case.loss_fn(out, mine) if hasattr(case, "loss_fn") else default_loss(out, mine)
            total += api.mean(loss.detach()) / len(micros)
            api.backward(loss)
            api.step()
        losses.append(total)
        norms.append(api.last_norm if api.clip else None)
    return api.result(losses, norms)


def default_loss(out, micro):
    target = micro.get("target")
    return out.pow(2).mean() if target is None else (out - target).pow(2).mean()


def run_case(path, api_class, **attributes):
    """Run a case on the calling rank (or plainly) and return its result."""
    case = load(path)
    model, inputs, _ = case.make_case()
    api = type("API", (api_class,), attributes)()
    if hasattr(case, "run"):
        return case.run(api, model, inputs)
    return default_run(case, api, model, inputs)


def difference(first, second):
    """The largest difference relative to 1e-3 + |x|, and where it is."""
    worst, where = 0.0, ""
    assert first["params"].keys() == second["params"].keys()
    for name, one in first["params"].items():
        other = second["params"][name]
        assert one.shape == other.shape, name
        if one.numel():
            gap = (one.double() - other.double()).abs() / (1e-3 + one.double().abs())
            gap = float(gap.max())
            if not gap <= worst:
                worst, where = gap, name
    for key in ("losses", "norms"):
        for index, (one, other) in enumerate(zip(first[key], second[key], strict=True)):
            if (
                one is None
                or other is None
                or (not math.isfinite(one) and not math.isfinite(other))
            ):
                continue
            gap = abs(one - other) / (1e-3 + abs(one))
            if not gap <= worst:
                worst, where = gap, f"{key}[{index}]: {one} and {other}"
    return worst, where
