"""Every closed form beside a real run: small models, the engine, the virtual GPU's ledger."""

from functools import cache, partial

import pytest
import torch

import zerolab
from zerolab import checkpointing, comm, data, gpt
from zerolab.sim import estimate

SHAPE = gpt.GPTConfig(vocab_size=256, seq_len=16, dim=24, num_heads=3, num_layers=4)
MICRO = 2
BUCKET_NUMEL = 5000  # two or three buckets a block, two for the root
OPTIMIZERS = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-3}},
    "adam": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-3}},
    "lion": {"type": "Lion", "params": {"lr": 1e-4}},
    "momentum": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-3}},
}


def make_config(stage, dtype, accum=1, optimizer="adamw", zero=None, **more):
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accum,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET_NUMEL, **(zero or {})},
        "optimizer": OPTIMIZERS[optimizer],
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    return config | more


def make_model(shape, checkpointed=False, freeze=()):
    torch.manual_seed(0)
    model = gpt.GPT(shape)
    if checkpointed:
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpointing.checkpoint(plain, x)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(word in name for word in freeze))
    return model


def train(config, shape=SHAPE, checkpointed=False, freeze=(), steps=2):
    """Train a few steps on the calling rank and measure the last one."""
    engine, *_ = zerolab.initialize(model=make_model(shape, checkpointed, freeze), config=config)
    rank, world_size = comm.get_rank(), comm.get_world_size()
    stream = data.batches(data.load_text(), rank, world_size, MICRO, shape.seq_len, seed=0)
    records = engine.records()
    for _ in range(steps):
        before = len(records.memory), len(records.collectives)
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(*next(stream))
            engine.backward(loss)
            del loss
            engine.step()
    memory = list(records.memory)[before[0] :]
    return {
        "states": engine.state_bytes(),
        "moved": moved(records.collectives[before[1] :]),
        "activation": sum(e.delta for e in memory if is_born(e, "activation", "forward")),
        "peaks": {kind: peak(memory, kind) for kind in ("bucket", "gathered")},
        "scratch": max(
            [e.delta for e in memory if is_born(e, "temp", "step") and e.op == "aten._to_copy"],
            default=0,
        ),
    }


def is_born(event, kind, phase):
    return event.delta > 0 and event.kind == kind and event.phase == phase


def moved(events):
    """Elements of all data collectives, an all-reduce counted twice."""
    times = {"all_reduce": 2}
    return sum(times.get(e.op, 1) * e.elements for e in events if e.purpose == "data")


def peak(memory, kind):
    """The most bytes of one kind at a time."""
    most = held = 0
    for event in memory:
        if event.kind == kind:
            held += event.delta
            most = max(most, held)
    return most


@cache
def run(stage, world_size, dtype):
    return comm.run(train, world_size, args=(make_config(stage, dtype),))


def run_once(config):
    """One step on two ranks, rank 0's measurements."""
    return comm.run(partial(train, config, steps=1), 2)[0]


def layouts(world_size, model=None, **more):
    model = make_model(SHAPE) if model is None else model
    return [
        estimate.layout(model, BUCKET_NUMEL, world_size, rank, **more) for rank in range(world_size)
    ]


EVERY_RUN = [
    (stage, world_size, dtype)
    for world_size, dtype in ((1, "bf16"), (2, "bf16"), (3, "bf16"), (4, "bf16"), (3, "fp32"))
    for stage in range(4)
]


@pytest.mark.parametrize(("stage", "world_size", "dtype"), EVERY_RUN)
def test_states_traffic_and_activations_are_exact_on_every_rank(stage, world_size, dtype):
    activation = estimate.activation_bytes(SHAPE, MICRO, dtype)
    for rank, sizes in zip(run(stage, world_size, dtype), layouts(world_size), strict=True):
        assert rank["states"] == estimate.state_bytes(stage, dtype, sizes)
        assert rank["moved"] == estimate.elements_moved(stage, sizes.padded_numel)
        assert rank["activation"] == activation


@pytest.mark.parametrize(("stage", "world_size", "dtype"), EVERY_RUN)
def test_peaks_of_temporaries_are_exact_on_every_rank(stage, world_size, dtype):
    for rank, sizes in zip(run(stage, world_size, dtype), layouts(world_size), strict=True):
        arrivals = estimate.gpt_arrivals(sizes)
        assert rank["peaks"] == {
            "bucket": estimate.bucket_peak_bytes(stage, sizes, dtype, arrivals),
            "gathered": estimate.gathered_peak_bytes(stage, sizes, dtype),
        }
        assert rank["scratch"] == estimate.step_scratch_bytes(stage, sizes, dtype)


def test_peaks_without_overlap_and_without_prefetch_are_exact():
    config = make_config(3, "bf16", zero={"overlap_comm": False}, zerolab={"prefetch": False})
    for rank, sizes in zip(comm.run(train, 2, args=(config,)), layouts(2), strict=True):
        arrivals = estimate.gpt_arrivals(sizes)
        assert rank["peaks"]["bucket"] == 2 * estimate.bucket_peak_numel(sizes, arrivals, 0)
        gathered = estimate.gathered_peak_bytes(3, sizes, "bf16", prefetch=False)
        assert (
            rank["peaks"]["gathered"] == gathered < estimate.gathered_peak_bytes(3, sizes, "bf16")
        )


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_optimizer_remembers_what_the_table_says(optimizer):
    config = make_config(2, "bf16", optimizer=optimizer)
    for rank, sizes in zip(comm.run(train, 2, args=(config,)), layouts(2), strict=True):
        form = estimate.state_bytes(2, "bf16", sizes, optimizer=optimizer)
        assert rank["states"] == form


def test_the_papers_table_is_the_engine_without_padding_and_step_counts():
    numel = gpt.num_params(SHAPE)
    for stage in range(4):
        measured = run(stage, 4, "bf16")[0]["states"]
        paper = estimate.model_states(numel, 4, stage)
        sizes = layouts(4)[0]
        segments = 4 * (sizes.num_pieces if stage == 0 else sizes.num_params)
        padding = 16 * (sizes.padded_numel - sizes.numel)
        assert set(measured) == set(paper)
        assert sum(measured.values()) - sum(paper.values()) - segments <= padding


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_kept_in_fp32_are_exact(stage):
    more = {"data_types": {"grad_accum_dtype": "fp32"}}
    ranks = comm.run(train, 2, args=(make_config(stage, "bf16", **more),))
    for rank, sizes in zip(ranks, layouts(2), strict=True):
        form = estimate.state_bytes(stage, "bf16", sizes, grad_dtype="fp32")
        assert rank["states"] == form


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("options", [{}, {"every": True}, {"every": False}])
def test_accumulation_moves_what_its_schedule_says(stage, options):
    words = {True: "micro_step", False: "boundary"}
    more = {"zerolab": {"reduce": words[options["every"]]}} if options else {}
    sizes, every = layouts(2)[0], options.get("every")
    config = make_config(stage, "bf16", accum=3, **more)
    form = estimate.elements_moved(stage, sizes.padded_numel, 3, every_micro_step=every)
    assert run_once(config)["moved"] == form


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("accum", [1, 3])
def test_receiving_every_slice_costs_what_deepspeeds_default_does(stage, accum):
    config = make_config(stage, "bf16", accum, zero={"reduce_scatter": False})
    padded = layouts(2)[0].padded_numel
    form = estimate.elements_moved(stage, padded, accum, all_reduce=True)
    assert form == padded * {(1, 1): 3, (1, 3): 3, (2, 1): 3, (2, 3): 7}[stage, accum]
    assert run_once(config)["moved"] == form


def test_keeping_parameters_until_backward_moves_one_psi_less():
    config = make_config(3, "bf16", 2, zerolab={"reshard_after_forward": False})
    padded = layouts(2)[0].padded_numel
    form = estimate.elements_moved(3, padded, 2, reshard_after_forward=False)
    assert form == 4 * padded
    assert run_once(config)["moved"] == form


@pytest.mark.parametrize(
    ("stage", "threshold"), [(0, 0), (1, 0), (2, 0), (3, 0), (3, 24), (3, 600)]
)
def test_frozen_and_persistent_parameters_are_exact(stage, threshold):
    freeze = ("mlp.widen", "position")
    zero = {"stage3_param_persistence_threshold": threshold}
    config = make_config(stage, "bf16", accum=2, zero=zero)
    config["optimizer"] = OPTIMIZERS["adamw"]
    sizes = layouts(2, make_model(SHAPE, freeze=freeze), persistence_threshold=threshold)
    ranks = comm.run(train, 2, args=(config, SHAPE, False, freeze))
    assert (sizes[0].persistent_numel > 0) == (threshold > 0)
    for rank, own in zip(ranks, sizes, strict=True):
        assert rank["states"] == estimate.state_bytes(stage, "bf16", own)
        assert rank["moved"] == estimate.elements_moved_by(own, stage, accum_steps=2)
        assert rank["peaks"]["gathered"] == estimate.gathered_peak_bytes(stage, own, "bf16")


SHAPES = {
    "plain": {},
    "one head": {"num_heads": 1},
    "one token": {"seq_len": 1},
    "odd": {"vocab_size": 256, "seq_len": 7, "dim": 15, "num_heads": 5, "num_layers": 1},
    "untied": {"tie": False},
}


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, "bf16") for shape in SHAPES), ("plain", "fp32"), ("odd", "fp16")]
)
@pytest.mark.parametrize("kind", ["fused", "manual", "dropout"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_activations_are_exact_to_the_byte(shape, dtype, kind, checkpointed):
    how = {"dropout": 0.1} if kind == "dropout" else {"attention": kind}
    facts = {"vocab_size": 256, "seq_len": 16, "dim": 24, "num_heads": 3, "num_layers": 2}
    config = gpt.GPTConfig(**(facts | SHAPES[shape] | how))
    measured = comm.run(train, 1, args=(make_config(0, dtype), config, checkpointed))[0]
    form = estimate.activation_bytes(config, MICRO, dtype, checkpointed=checkpointed)
    assert measured["activation"] == form


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["fused", "manual"])
def test_a_block_more_costs_what_a_block_keeps(batch, kind):
    def activations(num_layers):
        config = gpt.GPTConfig(256, 16, 24, 3, num_layers, attention=kind)
        gpu = zerolab.VirtualGPU()
        with gpu:
            tokens = torch.zeros(batch, 16, dtype=torch.int64)
            gpu.set_phase("forward")
            loss = gpt.GPT(config)(tokens, tokens)
            gpu.set_phase("backward")
            weights = 4 * gpt.num_params(config)
            held = gpu.by_kind()["activation"] - weights
            del loss
        return held, estimate.block_activation_bytes(config, batch, "fp32")

    (two, block), (three, _) = activations(2), activations(3)
    assert three - two == block


def test_the_papers_34_sbh_is_the_block_but_for_the_mask_and_the_norms():
    config = gpt.GPTConfig(256, 32, 48, 4, 2, dropout=0.1)
    measured = [
        comm.run(train, 1, args=(make_config(0, "bf16"), shape))[0]["activation"]
        for shape in (config, gpt.GPTConfig(256, 32, 48, 4, 3, dropout=0.1))
    ]
    paper = estimate.paper_activation_bytes(32, MICRO, 48, 4)
    mask, norms = 32 * 32, 4 * MICRO * 32 * 2
    assert measured[1] - measured[0] == paper + mask + norms


def test_a_checkpointed_block_keeps_two_bytes_an_element():
    shapes = [gpt.GPTConfig(256, 32, 48, 4, layers) for layers in (2, 3)]
    two, three = (
        comm.run(train, 1, args=(make_config(0, "bf16"), shape, True))[0]["activation"]
        for shape in shapes
    )
    paper = estimate.paper_activation_bytes(32, MICRO, 48, 4, checkpointed=True)
    assert three - two == paper
