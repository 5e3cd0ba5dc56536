"""Scripts for DeepSpeed run with `import zerolab as deepspeed`, and train as plain torch does."""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stage_runs import full_params, make_batches, make_config, make_model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import zerolab
from zerolab import UsageError, checkpointing, comm, utils
from zerolab.sim import deepspeed_estimators as estimators

SCRIPTS = Path(__file__).parent / "scripts"
WORLD_SIZE = 2


def launch(script, tmp_path, *arguments):
    """Run a script on two gloo ranks under torchrun and return what it wrote."""
    output = tmp_path / "output.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(SCRIPTS / script), "--output", str(output), *map(str, arguments)]
    root = str(SCRIPTS.parent.parent)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    environment = {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(output.read_text())


def load(script):
    """The script as a module, for its model and its data."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, SCRIPTS / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(found, expected):
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)


def test_a_classifier_with_data_and_schedule_from_initialize(tmp_path):
    script, config = load("train_classifier.py"), SCRIPTS / "ds_classifier.json"
    arguments = ("--deepspeed", "--deepspeed_config", config)
    found = launch("train_classifier.py", tmp_path, *arguments)
    torch.manual_seed(42)
    net, data = script.Net(), script.make_dataset()
    optimizer = torch.optim.Adam(
        net.parameters(),
        betas=(0.8, 0.999),
        weight_decay=3e-7,
        decoupled_weight_decay=True,
    )
    rates = warm_up(0.01, 4)
    loaders = [
        DataLoader(data, 4, sampler=DistributedSampler(data, WORLD_SIZE, rank))
        for rank in range(WORLD_SIZE)
    ]
    losses = []
    for _ in range(2):
        for parts in zip(*loaders, strict=True):
            x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            optimizer.param_groups[0]["lr"] = rates[len(losses)]
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    close(found["losses"], torch.tensor(losses))
    for name, param in net.named_parameters():
        close(found["weights"][name], param.detach())


def warm_up(top, num_steps):
    """DeepSpeed's WarmupLR, log rule: the rate of each step. Its first two are 0, as there."""
    rates = [top * math.log(step + 1) / math.log(num_steps) for step in range(num_steps)]
    return [0.0, *rates, *[top] * 20]


def test_a_language_model_built_under_zero_init_at_stage_three(tmp_path):
    script = load("train_language_model.py")
    config = SCRIPTS / "ds_language_model.json"
    found = launch("train_language_model.py", tmp_path, "--deepspeed_config", config)
    torch.manual_seed(1)
    model = script.LanguageModel()
    nn.init.constant_(model.layers[0].norm.weight, 1.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.1)
    losses = []
    for step in range(6):
        loss = model(script.make_batches(0, 1, 4, 3)[step % 3])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    close(found["losses"], torch.tensor(losses))
    for name, param in model.named_parameters():
        close(found["weights"][name], param.detach())
        assert found["state"][name] == found["weights"][name]
    assert found["state"].keys() == model.state_dict().keys()


def test_accumulation_with_an_optimizer_and_a_schedule_of_the_script(tmp_path):
    script = load("train_accumulate.py")
    found = launch("train_accumulate.py", tmp_path)
    torch.manual_seed(7)
    model = script.make_model()
    optimizer = script.make_optimizer(model.parameters())
    scheduler = script.make_scheduler(optimizer)
    evaluations, rates, losses = [], [], []
    own = script.make_batches(0, WORLD_SIZE, 12)
    everybody = [merge(script, micro) for micro in range(12)]
    for micro_step, (x, y) in enumerate(everybody):
        losses.append(nn.functional.mse_loss(model(own[micro_step][0]), own[micro_step][1]).item())
        (nn.functional.mse_loss(model(x), y) / 3).backward()
        if micro_step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
            evaluations.append(model(torch.ones(1, 6)).item())
    close(found["losses"], torch.tensor(losses))
    close(found["evaluations"], torch.tensor(evaluations))
    assert found["rates"] == rates


def merge(script, micro_step):
    """The micro-batches of all ranks as one."""
    parts = [script.make_batches(rank, WORLD_SIZE, 12)[micro_step] for rank in range(WORLD_SIZE)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


# -- arguments and ranks --------------------------------------------------------------------


def test_the_parser_gets_deepspeeds_arguments():
    parser = zerolab.add_config_arguments(argparse.ArgumentParser())
    found = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json"])
    assert found.deepspeed and found.deepspeed_config == "a.json"
    assert not found.deepscale and found.deepscale_config is None
    assert not parser.parse_args([]).deepspeed


@pytest.mark.parametrize(
    ("name", "warned"), [("deepspeed_config", False), ("deepscale_config", True)]
)
def test_initialize_reads_the_configuration_that_the_arguments_name(tmp_path, caplog, name, warned):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(make_config(1, micro=5)))
    parser = zerolab.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args([f"--{name}", str(path)])
    engine, *_ = zerolab.initialize(args=args, model=nn.Linear(2, 2))
    assert engine.train_micro_batch_size_per_gpu() == 5 and engine.zero_optimization_stage() == 1
    assert ("old name" in caplog.text) == warned


def test_initialize_takes_deepspeeds_other_arguments_or_says_why_not():
    config = make_config(0)
    engine, *_ = zerolab.initialize(
        model=nn.Linear(2, 2), config_params=config, dist_init_required=None, mpu=None
    )
    assert engine.stage == 0
    with pytest.raises(UsageError, match="no model parallelism"):
        zerolab.initialize(model=nn.Linear(2, 2), config=config, mpu=object())
    with pytest.raises(UsageError, match="no argument 'confg'"):
        zerolab.initialize(model=nn.Linear(2, 2), confg=config)
    with pytest.raises(UsageError, match="needs config="):
        zerolab.initialize(model=nn.Linear(2, 2))


def test_init_distributed_inside_a_run_and_alone_does_nothing():
    def ranks():
        zerolab.init_distributed(dist_backend="nccl", timeout=10, dist_init_required=True)
        names = comm.get_rank(), comm.get_local_rank(), comm.get_world_size()
        return *names, comm.is_initialized()

    assert comm.run(ranks, 2) == [(0, 0, 2, True), (1, 1, 2, True)]
    zerolab.init_distributed()
    assert not comm.is_initialized() and comm.get_local_rank() == 0
    with pytest.raises(UsageError, match="'mpi' is unknown"):
        zerolab.init_distributed("mpi")
    with pytest.raises(UsageError, match="come from the environment"):
        zerolab.init_distributed(rank=0, world_size=2)
    with pytest.raises(UsageError, match="no argument 'ranks'"):
        zerolab.init_distributed(ranks=2)


def test_the_names_of_the_package_are_there():
    names = (zerolab.zero.Init, zerolab.zero.GatheredParameters, zerolab.utils.safe_get_full_grad)
    assert all(callable(name) for name in (*names, zerolab.checkpointing.checkpoint))
    assert zerolab.estimate_zero2_model_states_mem_needs is (
        estimators.estimate_zero2_model_states_mem_needs
    )
    assert callable(utils.set_z3_leaf_modules)
    with pytest.raises(AttributeError, match="no attribute 'set_z3'"):
        _ = utils.set_z3


# -- what scripts ask of the engine ---------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
def test_the_engine_answers_what_scripts_ask(stage):
    def ask():
        model = make_model("odd")
        engine, optimizer, _, _ = zerolab.initialize(model=model, config=make_config(stage))
        assert engine.global_rank == engine.local_rank == comm.get_rank()
        assert engine.world_size == 2 and engine.device == torch.device("cpu")
        assert engine.cur_scale == engine.loss_scale() == 1 and not engine.was_step_applied()
        engine.set_lr(0.5)
        assert engine.get_lr() == [0.5] == [g["lr"] for g in optimizer.param_groups]
        assert engine.eval().training is engine.module.training is False
        assert engine.train().training and engine.first is model.first  # the model's attribute
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = engine.nothing
        state, params = engine.module_state_dict(), full_params(engine)
        assert all(torch.equal(state[name], value) for name, value in params.items())
        assert torch.equal(state["tied.weight"], state["last.weight"])

    comm.run(ask, 2)


def test_a_skipped_step_was_not_applied():
    def ask():
        config = make_config(2, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
        engine, *_ = zerolab.initialize(model=make_model("odd"), config=config)
        applied = []
        for factor in (1.0, float("inf") if comm.get_rank() else 1.0, 1.0):
            x, y = (t.half() for t in make_batches("odd", comm.get_rank(), 2, 2, 1)[0])
            engine.backward(engine(x, y) * factor)
            engine.step()
            applied.append(engine.was_step_applied())
        return applied, engine.cur_scale

    assert comm.run(ask, 2) == [([True, False, True], 8.0)] * 2


@pytest.mark.parametrize("stage", range(4))
def test_the_batch_size_can_be_changed_between_steps(stage):
    def change():
        engine, *_ = zerolab.initialize(model=make_model("odd"), config=make_config(stage, micro=2))
        batches = iter(make_batches("odd", comm.get_rank(), 2, 2, 8))
        applied = []

        def micro_step():
            engine.backward(engine(*next(batches)))
            engine.step()
            applied.append(engine.was_step_applied())

        micro_step()
        engine.set_train_batch_size(12)
        assert engine.gradient_accumulation_steps() == 3 and engine.train_batch_size() == 12
        micro_step()
        with pytest.raises(UsageError, match="1 of 3 micro-steps are done"):
            engine.set_train_batch_size(4)
        micro_step()
        micro_step()
        engine.set_train_micro_batch_size(1)
        assert engine.train_batch_size() == 6 and engine.train_micro_batch_size_per_gpu() == 1
        with pytest.raises(UsageError, match="no multiple of 2 = 1 a micro-step x 2 ranks"):
            engine.set_train_batch_size(7)
        return applied

    assert comm.run(change, 2) == [[True, False, False, True]] * 2


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_keeps_gradients_local_until_the_backward_after_it(stage):
    def train(quiet):
        config = make_config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}})
        engine, *_ = zerolab.initialize(model=make_model("odd"), config=config)
        first, second = make_batches("odd", comm.get_rank(), 2, 2, 2)
        before = len(engine.records().collectives)
        if quiet:
            with engine.no_sync():
                engine.backward(engine(*first))
                moved = len(engine.records().collectives) - before
                with pytest.raises(UsageError, match="inside no_sync"):
                    engine.step()
                with pytest.raises(UsageError, match="one block is enough"), engine.no_sync():
                    pass
            engine.backward(engine(*second))
        else:
            moved = 0
            engine.backward(engine(*first) + engine(*second))
        engine.step()
        return moved, full_params(engine)

    for (moved, params), (_, expected) in zip(
        comm.run(train, 2, args=(True,)), comm.run(train, 2, args=(False,)), strict=True
    ):
        assert moved == 0
        for name, value in params.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_is_refused_where_gradients_are_sharded(stage):
    engine, *_ = zerolab.initialize(model=nn.Linear(2, 2), config=make_config(stage))
    with pytest.raises(UsageError, match=f"cannot work at stage {stage}"), engine.no_sync():
        pass


# -- activation checkpointing ---------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))
            for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return x.pow(2).mean()


@pytest.mark.parametrize("stage", range(4))
def test_recomputation_gives_the_same_bits_with_dropout_and_holds_less(stage):
    def train(recompute):
        torch.manual_seed(0)
        gpu = zerolab.device.current()
        run = checkpointing.checkpoint if recompute else lambda layer, x: layer(x)
        engine, *_ = zerolab.initialize(model=Deep(run), config=make_config(stage))
        losses = []
        for _ in range(3):
            x = torch.ones(400, 8, requires_grad=True)
            loss = engine(x)
            held = gpu.allocated_bytes
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, held

    for (plain, much), (same, less) in zip(
        comm.run(train, 2, args=(False,)), comm.run(train, 2, args=(True,)), strict=True
    ):
        assert plain == same and less < much / 2


def test_checkpointing_is_configured_or_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(checkpointing, "_configured", False)
    config = make_config(1)
    block = {"activation_checkpointing": {"cpu_checkpointing": True}}
    for arguments, part in [
        ({"partition_activations": True}, "model-parallel ranks"),
        ({"contiguous_checkpointing": True}, "arena"),
        ({"checkpoint_in_cpu": True}, "offload chapter"),
        ({"deepspeed_config": config | block}, "cpu_checkpointing: .*offload chapter"),
        ({"mpu_": object()}, "no model parallelism"),
        ({"profil": True}, "no argument 'profil'"),
    ]:
        with pytest.raises(UsageError, match=part):
            checkpointing.configure(**arguments)
    assert not checkpointing.is_configured()
    checkpointing.configure(None, deepspeed_config=config | block, checkpoint_in_cpu=False)
    assert checkpointing.is_configured()
    checkpointing.reset()
    assert checkpointing.is_configured()


# -- DeepSpeed's memory estimators ----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"cpu_offload": True}, (7_500_000_000 * 256 * 1.5, 15_000_000_000)),
        ({"cpu_offload": False}, (7_500_000_000 * 32 * 1.5, 15_000_000_000 + 2_109_375_000)),
    ],
)
def test_zero2_estimates_are_deepspeeds(arguments, expected):
    found = zerolab.estimate_zero2_model_states_mem_needs(7_500_000_000, 8, 8, **arguments)
    assert found == expected


@pytest.mark.parametrize(
    ("optimizer", "params", "zero_init", "host", "gpu"),
    [
        (True, True, True, 18 / 2 * 1.5, 0),
        (True, True, False, max(16, 9) * 1.5, 0),
        (True, False, True, 16 / 2 * 1.5, 2 / 8),
        (True, False, False, max(16, 8) * 1.5, 2 / 8),
        (False, False, True, 4 * 4 * 1.5 / 100, 18 / 8),
        (False, False, False, 4 * 4 * 1.5, 18 / 8),
    ],
)
def test_zero3_estimates_are_deepspeeds(optimizer, params, zero_init, host, gpu):
    psi = 800_000_000
    found = zerolab.estimate_zero3_model_states_mem_needs(
        psi, psi // 100, 4, 2, optimizer, params, zero_init
    )
    layer = 4 * psi // 100
    assert found == (int(psi * host), int(psi * gpu) + layer, layer)


def test_estimates_of_a_live_model_count_each_storage_once(capsys):
    model = make_model("odd")
    total = sum(param.numel() for param in model.parameters())
    assert estimators.model_to_params(model) == (total, 7 * 7 + 7)
    with torch.device("meta"):
        assert estimators.model_to_params(nn.Linear(1000, 1000)) == (1_001_000, 1_001_000)
    zerolab.estimate_zero2_model_states_mem_needs_all_live(model, 4, 2)
    zerolab.estimate_zero3_model_states_mem_needs_all_live(nn.Linear(2000, 1000), 8)
    printed = capsys.readouterr().out
    assert "2 nodes, 4 GPUs per node" in printed and "2M total params, 2M largest" in printed
    assert printed.count("GiB |") == 2 * (2 + 6)
    with pytest.raises(UsageError, match="cannot be"):
        zerolab.estimate_zero2_model_states_mem_needs(1, 0)
