"""zero.Init builds the same model in shards; GatheredParameters never loses a change."""

import copy
import gc
import io

import pytest
import torch
from stage_runs import full_params, make_batches, make_config, make_model, to_dtype, train
from torch import nn

import zerolab
from zerolab import (
    DeadlockError,
    UsageError,
    absent,
    comm,
    config,
    gpt,
    sharded_param,
    units,
    utils,
    zero,
)

WORLD_SIZES = (1, 2, 3)


def whole(module):
    """Copies of all parameters, whatever their state."""
    with zero.GatheredParameters(module.parameters()):
        return {name: param.detach().clone() for name, param in module.named_parameters()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def sharded_names(module):
    kind = sharded_param.ShardedParameter
    return {name for name, param in module.named_parameters() if isinstance(param, kind)}


# -- Init -----------------------------------------------------------------------------------


def build_and_train(name, dtype, stage=3, init=True, seed_by_rank=False, **options):
    torch.manual_seed(3 + (comm.get_rank() if seed_by_rank else 0))
    with zero.Init(enabled=init, **options):
        model = make_model(name) if not seed_by_rank else gpt.GPT(gpt.PRESETS[name])
    built = sharded_names(model)
    engine, *_ = zerolab.initialize(model=model, config=make_config(stage, dtype))
    before = full_params(engine)
    losses = []
    for batch in make_batches(name, comm.get_rank(), comm.get_world_size(), 2, 3):
        loss = engine(*to_dtype(batch, dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return built, before, losses, full_params(engine), torch.rand(2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", ["odd", "gpt-nano"])
def test_a_model_built_under_init_has_the_bits_of_one_built_without(name, world_size, dtype):
    plain = comm.run(build_and_train, world_size, args=(name, dtype, 3, False))
    sharded = comm.run(build_and_train, world_size, args=(name, dtype))
    for one, other in zip(plain, sharded, strict=True):
        assert not one[0] and other[0] == one[1].keys()  # every parameter, ties counted once
        assert same(one[1], other[1])
        assert one[2] == other[2] and same(one[3], other[3])
        assert torch.equal(one[4], other[4])  # not one random number more or less


@pytest.mark.parametrize("stage", range(3))
def test_other_stages_take_a_model_built_under_init(stage):
    plain = comm.run(build_and_train, 2, args=("odd", "bf16", stage, False))[0]
    sharded = comm.run(build_and_train, 2, args=("odd", "bf16", stage))[0]
    assert sharded[0] and plain[2] == sharded[2] and same(plain[3], sharded[3])


def test_rank_zero_decides_the_weights_when_seeds_differ():
    first, second = comm.run(lambda: build_and_train("gpt-nano", "fp32", seed_by_rank=True), 2)
    alone = comm.run(lambda: build_and_train("gpt-nano", "fp32", seed_by_rank=True), 1)[0]
    assert same(first[1], second[1]) and same(first[1], alone[1])


def test_a_dtype_is_cast_to_when_sharding():
    def build(init):
        torch.manual_seed(0)
        with zero.Init(enabled=init, dtype=torch.bfloat16):
            model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
        return whole(model if init else model.bfloat16())

    for plain, sharded in zip(
        comm.run(build, 3, args=(False,)), comm.run(build, 3, args=(True,)), strict=True
    ):
        assert same(plain, sharded)
        assert all(value.dtype == torch.bfloat16 for value in sharded.values())


BIG = gpt.GPTConfig(seq_len=16, dim=64, num_heads=2, num_layers=8)


def big_run(init):
    """Build and train a model of 1.7 MiB of fp32 weights; note the peaks of the GPU."""
    gpu = zerolab.device.current()
    with zero.Init(enabled=init):
        model = gpt.GPT(BIG)
    built = gpu.peak_bytes
    config = make_config(3, "bf16", micro=1)
    engine, *_ = zerolab.initialize(model=model, config=config)
    made = gpu.peak_bytes
    losses = []
    for _ in range(2):
        tokens = torch.randint(256, (1, 16))
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return built, made, losses


def test_a_model_larger_than_a_gpu_is_built_and_trained_only_under_init():
    numel = sum(param.numel() for param in gpt.GPT(BIG).parameters())
    full, capacity = 4 * numel, int(4 * numel * 0.93)
    unlimited = comm.run(big_run, 8, args=(False,))
    built, made, losses = comm.run(big_run, 8, gpu_memory=capacity, args=(True,))[0]
    assert unlimited[0][0] >= full > capacity
    with pytest.raises(torch.OutOfMemoryError):
        comm.run(big_run, 8, gpu_memory=capacity, args=(False,))
    assert losses == unlimited[0][2]
    largest = 4 * 64 * 256  # a layer of the MLP, in bytes, and its twin while it is cut
    assert built <= full / 8 + 2.5 * largest
    assert made <= full / 8 + 3 * (6 * 20_000)  # exact slices; a bucket in fp32 and in bf16


def test_only_one_module_is_whole_while_a_list_is_built():
    def build():
        gpu = zerolab.device.current()
        with zero.Init():
            layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(20)])
        assert len(sharded_names(layers)) == 20
        return gpu.peak_bytes

    layer = 4 * 64 * 64
    assert comm.run(build, 4)[0] <= 20 * layer / 4 + 2 * layer


class Patchwork(nn.Module):
    """Re-initialises what is sharded already, in every way that people do."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(5, 4)
        self.two = nn.Linear(4, 4)
        self.three = nn.Linear(4, 4)
        self.tied = nn.Linear(5, 4)
        self.tied.weight = self.one.weight
        self.late = nn.Parameter(torch.randn(3))
        self.three.bias = nn.Parameter(torch.full((4,), 0.25))
        nn.init.xavier_uniform_(self.one.weight)
        with torch.no_grad():
            self.two.weight.copy_(self.three.weight * 2)
        self.three.weight.data.normal_(std=0.02)
        held = self.two.bias.data
        nn.init.zeros_(self.one.bias)
        held.fill_(3.0)
        self.apply(self.reset)

    def reset(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data[0] = 1.0
            with torch.no_grad():
                module.weight[1].mul_(-1)
                module.bias.add_(module.weight.sum())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_code_that_changes_sharded_parameters_sees_them_whole(world_size):
    def build(init):
        torch.manual_seed(1)
        with zero.Init(enabled=init):
            model = Patchwork()
        assert model.tied.weight is model.one.weight
        if init:
            assert sharded_names(model) == {name for name, _ in model.named_parameters()}
            assert model.one.weight.shape == (4, 5) and model.one.weight.numel() == 20
        return whole(model)

    for plain, sharded in zip(
        comm.run(build, world_size, args=(False,)),
        comm.run(build, world_size, args=(True,)),
        strict=True,
    ):
        assert same(plain, sharded)


def test_copies_of_a_sharded_module_are_sharded_and_equal():
    def build(init):
        torch.manual_seed(1)
        with zero.Init(enabled=init):
            layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
            model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        assert len(sharded_names(model)) == (len(list(model.parameters())) if init else 0)
        copied = copy.deepcopy(model.layers[0])
        return whole(model) | {f"copy.{k}": v for k, v in whole(copied).items()}

    plain, sharded = comm.run(build, 2, args=(False,))[0], comm.run(build, 2, args=(True,))[0]
    assert same(plain, sharded)


def test_a_state_dict_can_be_read_saved_and_loaded_between_init_and_initialize():
    def build():
        torch.manual_seed(1)
        with zero.Init():
            model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        file = io.BytesIO()
        torch.save(model, file)
        assert same(torch.load(io.BytesIO(file.getvalue()), weights_only=False).state_dict(), state)
        model.load_state_dict({name: value + 1 for name, value in state.items()})
        del file
        return state, whole(model)

    for state, loaded in comm.run(build, 2):
        assert same({name: value + 1 for name, value in state.items()}, loaded)


def test_a_sharded_parameter_says_what_it_is_without_asking_other_ranks():
    def build():
        with zero.Init():
            layer = nn.Linear(5, 4)
        return repr(layer.weight) if comm.get_rank() == 0 else ""

    assert (
        comm.run(build, 2)[0]
        == "Parameter sharded: 10 elements here of shape (4, 5), dtype=torch.float32"
    )


def test_constructors_are_put_back_and_other_ranks_are_not_disturbed():
    before = nn.Linear.__init__, nn.Module.__dict__.get("__init_subclass__")

    def build():
        if comm.get_rank() == 1:
            comm.barrier()
            plain = nn.Linear(3, 3)
            comm.barrier()
            return len(sharded_names(plain))
        try:
            with zero.Init():
                comm.barrier()  # rank 1 builds its own layer now
                comm.barrier()
                raise KeyError("stop")
        except KeyError:
            return 0

    assert comm.run(build, 2) == [0, 0]
    assert (nn.Linear.__init__, nn.Module.__dict__.get("__init_subclass__")) == before


def test_classes_defined_inside_and_derived_classes_are_sharded_once():
    def build():
        with zero.Init():

            class Base(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a = nn.Parameter(torch.ones(4))

            class Derived(Base):
                def __init__(self):
                    super().__init__()
                    self.a.data += 1  # still whole: the constructor of the object has not ended
                    self.b = nn.Parameter(self.a.detach() * 2)

            model = Derived()
        events = [e.op for e in comm.records().collectives]
        return sharded_names(model), whole(model), events.count("broadcast")

    names, values, broadcasts = comm.run(build, 2)[0]
    assert names == {"a", "b"} and broadcasts == 2
    assert values["a"].tolist() == [2.0] * 4 and values["b"].tolist() == [4.0] * 4


def test_a_finished_model_can_be_sharded():
    def build():
        model = nn.Linear(5, 4)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        zero.Init(module=model)
        return sharded_names(model) == before.keys() and same(whole(model), before)

    assert all(comm.run(build, 3))


def test_a_configuration_below_stage_three_builds_whole_and_says_so(caplog):
    def build(stage):
        with zero.Init(config_dict_or_path=make_config(stage)):
            return len(sharded_names(nn.Linear(3, 3)))

    assert comm.run(build, 2, args=(2,)) == [0, 0]
    assert "at stage 2" in caplog.text
    assert comm.run(build, 2, args=(3,)) == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"remote_device": "cpu"}, "offload chapter"),
        ({"mpu": object()}, "model parallelism"),
        ({"dtype": "bf16"}, "torch.dtype"),
        ({"dtype": torch.int32}, "floating"),
        ({"remote": "cpu"}, "no argument 'remote'"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, part):
    with pytest.raises(UsageError, match=part):
        zero.Init(**arguments)


def test_a_model_sharded_for_other_ranks_is_refused():
    with zero.Init():
        model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match=r"built under zero\.Init on 1 ranks"):
        comm.run(lambda: zerolab.initialize(model=model, config=make_config(3)), 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_nothing_of_init_stays_when_the_model_is_dropped(stage):
    def live():
        gpu = zerolab.device.current()
        baseline = None
        for _ in range(3):
            with zero.Init():
                model = make_model("odd")
            engine, *_ = zerolab.initialize(model=model, config=make_config(stage))
            del model, engine
            gc.collect()
            baseline = gpu.allocated_bytes if baseline is None else baseline
        return gpu.allocated_bytes - baseline

    assert comm.run(live, 2) == [0, 0]


# -- GatheredParameters ---------------------------------------------------------------------


def make_engine(stage, dtype="fp32", name="odd"):
    return zerolab.initialize(model=make_model(name), config=make_config(stage, dtype))[0]


def one_step(engine, name="odd", dtype="fp32"):
    batch = make_batches(name, comm.get_rank(), comm.get_world_size(), 2, 1)[0]
    loss = engine(*to_dtype(batch, dtype))
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_rank_changes_parameters_for_everybody(stage, dtype):
    """The same as to train from a model that was changed beforehand, in the given elements only."""

    def change(before):
        model = make_model("odd")
        if before:
            with torch.no_grad():
                model.first.weight[0] = 0.5
        engine, *_ = zerolab.initialize(model=model, config=make_config(stage, dtype))
        if not before:
            with zero.GatheredParameters(model.first.weight, modifier_rank=1):
                if comm.get_rank() == 1:
                    with torch.no_grad():
                        model.first.weight[0] = 0.5
        loss = one_step(engine, dtype=dtype)
        return loss, full_params(engine)

    for early, late in zip(
        comm.run(change, 3, args=(True,)), comm.run(change, 3, args=(False,)), strict=True
    ):
        assert early[0] == late[0] and same(early[1], late[1])


@pytest.mark.parametrize("way", ["in place", "data", "assigned"])
def test_a_change_without_a_modifier_rank_is_an_error_at_stage_three(way):
    def change(rank):
        engine = make_engine(3)
        weight = engine.module.blocks[1].weight
        before = whole(engine.module)
        with zero.GatheredParameters([weight]):
            if comm.get_rank() == rank:
                with torch.no_grad():
                    if way == "in place":
                        weight.mul_(2)
                    elif way == "data":
                        weight.data[-1] = 7
                    else:
                        weight.data = torch.ones(7, 7)
        return before

    for rank in (0, 1):
        with pytest.raises(UsageError, match=r"'blocks\.1\.weight' was.*without a modifier_rank"):
            comm.run(change, 2, args=(rank,))
    comm.run(change, 2, args=(5,))  # nobody changes anything


@pytest.mark.parametrize("stage", range(3))
def test_below_stage_three_changes_of_all_ranks_are_honoured(stage):
    def change():
        engine = make_engine(stage, "bf16")
        with zero.GatheredParameters(engine.module.parameters()), torch.no_grad():
            engine.module.first.bias.fill_(2.0)
        home = zerolab.homes.find(engine.module.first.bias)
        return utils.safe_get_full_fp32_param(engine.module.first.bias), home.engine is engine

    for value, found in comm.run(change, 2):
        assert found and value.tolist() == [2.0] * 7


def test_reading_changes_nothing_and_master_weights_keep_their_precision():
    def read(modifier):
        engine = make_engine(3, "bf16")
        if modifier is not None:
            with zero.GatheredParameters(engine.module.parameters(), modifier_rank=modifier):
                total = sum(param.float().sum().item() for param in engine.module.parameters())
            assert total == total  # no NaN: all were whole
        return one_step(engine, dtype="bf16"), full_params(engine)

    plain, looked = comm.run(read, 3, args=(None,)), comm.run(read, 3, args=(1,))
    assert all(a[0] == b[0] and same(a[1], b[1]) for a, b in zip(plain, looked, strict=True))


def test_blocks_can_be_nested_and_the_model_runs_inside():
    def nest():
        engine = make_engine(3)
        module = engine.module
        batch = make_batches("odd", comm.get_rank(), 2, 2, 1)[0]
        outside = engine(*batch).item()
        with zero.GatheredParameters(module.parameters()):
            inside = engine(*batch).item()
            with zero.GatheredParameters(module.first.weight, modifier_rank=0), torch.no_grad():
                module.first.weight.mul_(2)
            assert not module.first.weight.isnan().any()  # the outer block still holds it
            doubled = engine(*batch).item()
            loss = one_step(engine)
            fresh = {n: p.detach().clone() for n, p in module.named_parameters()}
        return (
            outside,
            inside,
            doubled,
            loss,
            same(fresh, whole(module)),
            isinstance(module.first.weight, absent.AbsentParameter),
        )

    for outside, inside, doubled, loss, fresh, gone in comm.run(nest, 2):
        assert outside == inside and inside != doubled and doubled == loss
        assert fresh and gone


def test_a_block_inside_forward_leaves_the_running_unit_whole():
    class Peek(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(PeekBlock() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.pow(2).mean()

    class PeekBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x):
            with zero.GatheredParameters(self.line.parameters()):
                norm = self.line.weight.detach().norm()
            return self.line(x) / norm

    def peek(stage):
        torch.manual_seed(2)
        engine, *_ = zerolab.initialize(model=Peek(), config=make_config(stage))
        losses = []
        for _ in range(2):
            loss = engine(torch.ones(2, 4))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    assert comm.run(peek, 2, args=(0,)) == comm.run(peek, 2, args=(3,))


def test_what_is_gathered_is_freed_also_after_an_exception():
    def fail():
        engine = make_engine(3)
        gpu = zerolab.device.current()
        held = gpu.allocated_bytes
        block = zero.GatheredParameters(engine.module.parameters(), modifier_rank=0)
        with pytest.raises(KeyError), block:
            assert gpu.allocated_bytes > held
            raise KeyError("stop")
        return gpu.allocated_bytes - held

    assert comm.run(fail, 2) == [0, 0]


def test_parameters_before_initialize_and_of_no_engine():
    def before():
        with zero.Init():
            model = nn.Linear(3, 2)
        with zero.GatheredParameters(model.parameters(), modifier_rank=1), torch.no_grad():
            if comm.get_rank() == 1:
                model.weight.fill_(4.0)
        error = pytest.raises(UsageError, match="without a modifier_rank")
        with error, zero.GatheredParameters(model.weight), torch.no_grad():
            model.weight.zero_()
        plain = nn.Parameter(torch.zeros(3) + comm.get_rank())
        with zero.GatheredParameters(plain, modifier_rank=1):
            pass
        with zero.GatheredParameters([]), zero.GatheredParameters(iter([plain])):
            pass
        return whole(model)["weight"].unique().tolist(), plain.tolist(), len(sharded_names(model))

    assert comm.run(before, 2) == [([4.0], [1.0] * 3, 2)] * 2


def test_mistakes_with_gathered_parameters_are_named():
    with pytest.raises(UsageError, match=r"expected an nn\.Parameter"):
        zero.GatheredParameters([torch.ones(3)])
    with pytest.raises(UsageError, match=r"expected an nn\.Parameter or several, got Linear"):
        zero.GatheredParameters(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="modifier_rank 3"):
        zero.GatheredParameters([], modifier_rank=3)
    with zero.GatheredParameters(nn.Linear(2, 2), enabled=False):
        pass


def test_a_rank_that_does_not_gather_gives_the_table_of_a_deadlock():
    def gather():
        engine = make_engine(3)
        if comm.get_rank() == 0:
            with zero.GatheredParameters(engine.module.parameters()):
                pass

    with pytest.raises(DeadlockError, match="all_gather"):
        comm.run(gather, 2)


class OwnParameter(torch.nn.Parameter):
    """A parameter of a class of its own, which stays of that class while it is sharded."""


@pytest.mark.parametrize("write", ["zero_", "fill_", "normal_"])
def test_a_write_to_a_sharded_parameter_of_another_class_is_not_lost_in_silence(write):
    def change():
        model = make_model("odd")
        model.blocks[0].weight = OwnParameter(torch.ones(7, 7))
        engine, *_ = zerolab.initialize(model=model, config=make_config(3))
        data = engine.module.blocks[0].weight.data
        getattr(data, write)(*([7.0] if write == "fill_" else []))
        assert comm.get_rank() == 0  # only this rank has got so far
        one_step(engine)

    with pytest.raises((UsageError, RuntimeError), match=r"lost|single memory location"):
        comm.run(change, 1)
    comm.run(lambda: one_step(make_engine(3)), 2)  # the next engine is well


def test_parameters_whose_engine_is_gone_are_refused():
    def orphan():
        model = make_model("odd")
        zerolab.initialize(model=model, config=make_config(3))
        gc.collect()
        block = zero.GatheredParameters(model.parameters())
        with pytest.raises(UsageError, match="an engine that is gone"), block:
            pass

    comm.run(orphan, 2)


def test_running_out_of_memory_while_gathering_leaves_everything_sharded():
    def gather():
        gpu = zerolab.device.current()
        model = nn.Sequential(*[nn.Linear(10, 10) for _ in range(6)])
        engine, *_ = zerolab.initialize(model=model, config=make_config(3))
        held, gpu.capacity = gpu.allocated_bytes, gpu.allocated_bytes + 4 * 440  # four layers
        block = zero.GatheredParameters(model.parameters())
        with pytest.raises(torch.OutOfMemoryError), block:
            pass
        gpu.capacity = None
        return gpu.allocated_bytes - held, [t.holds for t in engine.sharding.turns.values()]

    extra, holds = comm.run(gather, 1)[0]
    assert extra == 0 and len(holds) == 6 and not any(holds)


# -- leaf modules ---------------------------------------------------------------------------


class Experts(nn.Module):
    """Each rank goes its own way: only a unit that holds all experts can work."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        return self.experts[comm.get_rank()](x)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.moe = Experts()

    def forward(self, x):
        return self.moe(self.enter(x)).pow(2).mean()


def test_leaf_modules_are_one_unit_so_that_ranks_may_part():
    def mix(stage, leaf):
        torch.manual_seed(4)
        model = Mixture()
        if leaf:
            assert utils.set_z3_leaf_modules(model, [Experts]) == [model.moe]
            assert utils.get_z3_leaf_modules(model) == [model.moe]
        engine, *_ = zerolab.initialize(model=model, config=make_config(stage))
        losses = []
        for _ in range(2):
            loss = engine(torch.ones(2, 4))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if stage == 3:
            with pytest.raises(UsageError, match="after initialize"):
                utils.set_z3_leaf_modules(model, ["Mixture"])
        return losses, [unit.name for unit in engine.sharding.units]

    plain, leaf = comm.run(mix, 2, args=(0, False)), comm.run(mix, 2, args=(3, True))
    assert [losses for losses, _ in plain] == [losses for losses, _ in leaf]
    assert leaf[0][1] == ["root", "moe"] and plain[0][1] == [
        "root",
        "moe.experts.0",
        "moe.experts.1",
    ]


def test_leaf_modules_are_found_by_class_or_name_and_can_be_unset():
    model = Mixture()
    assert utils.set_z3_leaf_modules(model, ["Linear"]) == [
        model.enter,
        *model.moe.experts,
    ]
    assert [path for path, _ in units.choose(model, [])] == [
        "enter",
        "moe.experts.0",
        "moe.experts.1",
    ]
    utils.unset_z3_leaf_modules(model, [nn.Linear])
    assert [path for path, _ in units.choose(model, [])] == ["moe.experts.0", "moe.experts.1"]
    with pytest.raises(UsageError, match="no module of class Conv2d"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])


def test_a_named_unit_that_the_model_lacks_is_an_error_of_that_key_with_the_nearest_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert [path for path, _ in units.choose(model, ["Linear", "1"])] == ["0", "1"]
    with pytest.raises(config.ConfigError) as caught:
        units.choose(model, ["Linaer", "0", "blocks"])
    assert {problem.key for problem in caught.value.problems} == {"zerolab.unit_modules"}
    assert "'Linaer' is no part of the model" in str(caught.value)
    assert "did you mean 'Linear'?" in str(caught.value) and "such as '0'" in str(caught.value)
    with pytest.raises(config.ConfigError, match="leave the list empty"):
        units.choose(nn.Linear(2, 2), ["Linear"])


def test_registering_an_external_parameter_is_accepted():
    layer = nn.Linear(2, 2)
    zero.register_external_parameter(layer, layer.weight)
    zero.unregister_external_parameter(layer, layer.weight)
    with pytest.raises(UsageError, match="got Tensor"):
        zero.register_external_parameter(layer, torch.ones(2))


def test_training_is_unchanged_by_all_this():
    assert comm.run(train, 2, args=("odd", make_config(3)))[0]["losses"]


# -- loading weights ------------------------------------------------------------------------


def load_and_train(stage, dtype, how):
    """Train two steps from loaded weights; the moments of step 0 stay out of it (SGD)."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
    torch.manual_seed(1)
    other = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **({} if dtype == torch.float32 else {"bf16": {"enabled": True}}),
    }
    if how == "before":
        model.load_state_dict(other.state_dict())
    engine = zerolab.initialize(model=model, config=config)[0]
    if how == "engine":
        engine.load_module_state_dict(other.state_dict())
    elif how == "torch":
        engine.module.load_state_dict(other.state_dict())
    elif how == "parts":
        for part, source in zip(engine.module, other, strict=True):
            part.load_state_dict(source.state_dict())
    for number in range(2):
        x = torch.full((4, 6), 0.1 * (number + 1) * (comm.get_rank() + 1), dtype=dtype)
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["engine", "torch", "parts"])
def test_loaded_weights_are_what_the_optimizer_goes_on_from(stage, dtype, how):
    if stage == 3 and how != "engine":
        with pytest.raises(UsageError, match=r"engine\.load_module_state_dict"):
            comm.run(load_and_train, world_size=2, args=(stage, dtype, how))
        return
    expected = comm.run(load_and_train, world_size=2, args=(stage, dtype, "before"))
    found = comm.run(load_and_train, world_size=2, args=(stage, dtype, how))
    for rank, state in enumerate(found):
        for name, value in state.items():
            close = 0 if dtype == torch.float32 else 8e-3  # the master started from 16 bits
            torch.testing.assert_close(value, expected[rank][name], rtol=close, atol=close)
