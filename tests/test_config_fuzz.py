"""Whatever a configuration holds: a Config or a ConfigError, and the mended one trains."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zerolab
from zerolab import comm, config
from zerolab.config import explain, keys, optimizers, renamed, schedulers, schema, source

ALL = list(keys.all_keys(schema.File))
NAMES = sorted({name for key in ALL for name in (key.name, *key.other_names)})
OLD = [*renamed.OLD_OFFLOAD, renamed.PINNED, renamed.OLD_SAVE, *(path[-1] for path in renamed.GONE)]
WORLDS = st.integers(1, 12)
MOST_MICRO_STEPS = 4
# What only a model can tell: whether it has such a part, so many groups of parameters.
SCRIPT_DECIDES = ("zerolab.unit_modules", "scheduler.params")

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.sampled_from([2**63, -(10**400), 10**400, 1e308, "\ud800", "\x1b[31m"]),
    st.sampled_from(
        ["auto", "cpu", "nvme", "none", "bf16", "fp16", "mean", "2", "AdamW", "", "WARN"]
    ),
    st.text(max_size=4),
)
# Pieces of a text that a reader has to tell apart, and some that Python's own json writes.
PIECES = """
{ } [ ] , : " ' \'\'\' // /* */ "a" "a": {"a": True NaN -Infinity 1e999 -0 lr [true|false]
"\\ud800" \\u12
""".split()
WORDS = st.lists(st.sampled_from([*PIECES, "\n", "#\n", "9" * 5000]), max_size=20)
rates = st.lists(st.floats(0, 1), max_size=3)
ARGUMENTS = "lr betas eps max_grad_norm x warmup_max_lr warmup_num_steps cycle_max_lr".split()
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def fitting(key: keys.Key):
    """Values for one key: mostly the kind it wants, sometimes anything."""
    if key.block is not None:
        return st.one_of(block(key.block), block(key.block), anything)
    if isinstance(key.default, bool):
        return st.one_of(st.booleans(), st.booleans(), scalars)
    if key.name == "params":
        return st.dictionaries(st.sampled_from(ARGUMENTS), scalars | rates, max_size=4)
    if key.name == "unit_modules":
        return st.lists(st.sampled_from(["0", "Linear", "cpu", ""]), max_size=2) | anything
    if key.name == "type":
        return (
            st.sampled_from(["AdamW", "SGD", "WarmupLR", "OneCycle", "Muon", "Adm", "auto"])
            | scalars
        )
    if key.name == "stage":
        return st.integers(0, 4)
    return st.one_of(st.just(key.default), st.integers(0, 64), scalars)


def block(kind: type[keys.Block]):
    wanted = {key.name: fitting(key) for key in keys.keys_of(kind)}
    strange = st.dictionaries(
        st.sampled_from(NAMES + OLD) | st.text(max_size=8), scalars, max_size=1
    )
    some = st.lists(st.sampled_from(sorted(wanted)), max_size=5, unique=True)
    known = some.flatmap(
        lambda names: st.fixed_dictionaries({name: wanted[name] for name in names})
    )
    return st.builds(lambda first, second: {**second, **first}, known, strange)


def files():
    batch = st.fixed_dictionaries({"train_batch_size": st.integers(1, 64)})
    zero = {"zero_optimization": block(schema.Zero)}
    return st.builds(
        lambda first, second, third: {**third, **second, **first},
        batch | st.just({}),
        st.fixed_dictionaries({}, optional=zero),
        block(schema.File),
    )


def outcome(raw, world_size):
    try:
        return config.load(raw, world_size)
    except config.ConfigError as refused:
        return refused


@settings(max_examples=60, deadline=None)
@given(files(), WORLDS)
def test_any_file_is_a_config_or_a_config_error_and_its_correction_is_a_config(raw, world_size):
    result = outcome(raw, world_size)
    assert isinstance(result, (config.Config, config.ConfigError))
    report = config.examine(raw, world_size)
    json.dumps(explain.as_json(report), default=str)
    corrected = report.corrected()
    assert config.examine(corrected, world_size).stoppers == (), corrected
    cfg = config.load(corrected, world_size)
    assert cfg.train_batch_size == cfg.micro_batch_size * cfg.accum_steps * world_size
    if isinstance(result, config.Config):
        assert result.stage == cfg.stage


@settings(max_examples=40, deadline=None)
@given(anything, WORLDS)
def test_any_value_is_a_config_or_a_config_error(value, world_size):
    assert isinstance(outcome(value, world_size), (config.Config, config.ConfigError))


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="{}[]\",:#/*|\\ \n'aTrue1.5-", max_size=40) | WORDS.map("".join))
def test_any_text_is_read_or_refused(text):
    try:
        assert isinstance(source.parse(text).raw, dict)
    except config.ConfigError as refused:
        assert str(refused)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(optimizers.ELEMENTWISE)),
    st.dictionaries(
        st.sampled_from(
            "lr betas eps weight_decay momentum nesterov fused foreach maximize".split()
        ),
        anything,
        max_size=3,
    ),
    st.sampled_from(sorted(schedulers.KINDS)),
    st.dictionaries(
        st.sampled_from("warmup_num_steps warmup_type total_num_steps step_size gamma".split()),
        anything,
        max_size=3,
    ),
)
def test_any_arguments_build_or_are_refused(kind, params, schedule, arguments):
    raw = {
        "train_batch_size": 4,
        "optimizer": {"type": kind, "params": params},
        "scheduler": {"type": schedule, "params": arguments},
    }
    assert isinstance(outcome(raw, 2), (config.Config, config.ConfigError))
    assert config.examine(config.examine(raw, 2).corrected(), 2).stoppers == ()


def train(raw):
    """The micro-steps of one step, at most four of them; the steps that the engine counts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    engine, _, _, _ = zerolab.initialize(model=model, config=raw)
    for _ in range(min(engine.config.accum_steps, MOST_MICRO_STEPS)):
        loss = engine(torch.randn(2, 3, dtype=engine.config.param_dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.close()
    return engine.global_steps, engine.config.accum_steps


def without(raw, dotted):
    """A copy of a file without one key."""
    block, name = dotted.split(".")
    rest = copy.deepcopy(raw)
    del rest[block][name]
    return rest


def run(raw, world_size):
    """What `train` counts; where the model refuses a key, without that key."""
    try:
        return comm.run(train, world_size=world_size, args=(raw,), ledger=False)
    except config.ConfigError as refused:
        (key,) = {problem.key for problem in refused.problems}
        assert key in SCRIPT_DECIDES
        assert all(problem.remedy for problem in refused.problems)
        return run(config.examine(without(raw, key), world_size).corrected(), world_size)


@settings(max_examples=25, deadline=None)
@given(files(), st.integers(1, 3))
def test_any_corrected_configuration_trains_without_a_traceback(raw, world_size):
    """Or is refused for what only the model can tell, with its name, and trains without it."""
    corrected = config.examine(raw, world_size).corrected()
    for steps, accum_steps in run(corrected, world_size):
        assert steps == (accum_steps <= MOST_MICRO_STEPS)


def test_circular_and_very_deep_dicts_are_refused():
    circular: dict = {"train_batch_size": 4}
    circular["zero_optimization"] = circular
    deep: dict = {}
    for _ in range(3000):
        deep = {"params": deep}
    for raw in (circular, {"train_batch_size": 4, "optimizer": deep}):
        with pytest.raises(config.ConfigError, match="blocks more than 20 deep"):
            config.load(raw, 2)
    with pytest.raises(config.ConfigError):
        source.parse('{"a":' * 5000)
    with pytest.raises(config.ConfigError, match="0 GPUs cannot train"):
        config.load({"train_batch_size": 4}, 0)
