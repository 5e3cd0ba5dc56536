"""The engine of a finished course: all solutions spliced into `my_zerolab`, judged like ours.

Invariants 1, 2 and 3 (equal bits, exact bytes, exact traffic) at stages 0 to 3 and world sizes 2
and 3, in the lockstep world and as processes that torchrun starts (once: first two of three ranks,
then all). `my_stage_runs.py` is stage_runs.py with the package's name changed.
"""

import importlib.util
import json
import linecache
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zerolab.lab import exercise, own_copy, plug

ROOT = Path(__file__).resolve().parents[1]
SIZES, STAGES = (2, 3), (0, 1, 2, 3)
PLANS = (("odd", "fp32"), ("odd", "bf16"))
PREAMBLE = """
import hashlib, json, os, sys
import torch
from my_stage_runs import STEPS, make_batches, make_config, make_model, to_dtype, train

import my_zerolab
from my_zerolab import VirtualGPU, comm, spec


def digest(params):
    both = [name.encode() + params[name].float().numpy().tobytes() for name in sorted(params)]
    return hashlib.sha256(b"".join(both)).hexdigest()


def facts(result):
    kept = ("losses", "state_bytes", "traffic", "counts")
    return {name: result[name] for name in kept} | {"params": digest(result["params"])}


def case(name, dtype, stage, world_size):
    return f"{name} {dtype} stage {stage} of {world_size}"
"""
LOCKSTEP = """
def expected(name, dtype, world_size, layout):
    ranks = [make_batches(name, r, world_size, 2, STEPS) for r in range(world_size)]
    steps = [[[to_dtype(rank[step], dtype) for rank in ranks]] for step in range(STEPS)]
    recipe = spec.Recipe(
        layout=layout,
        world_size=world_size,
        make_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
        dtype=torch.bfloat16 if dtype == "bf16" else torch.float32,
        mixed=dtype == "bf16",
    )
    found = comm.run(spec.train, 1, "lockstep", args=(make_model(name), steps, recipe))[0]
    return {"losses": found.losses, "params": digest(found.params)}


out = {}
for name, dtype in PLANS + (("gpt-nano", "fp32"),):
    for world_size in SIZES:
        for stage in STAGES:
            args = (name, make_config(stage, dtype), dtype)
            ranks = comm.run(train, world_size, "lockstep", args=args)
            out[case(name, dtype, stage, world_size)] = [facts(rank) for rank in ranks]
        layout = ranks[0]["layout"]
        out[f"spec {name} {dtype} {world_size}"] = expected(name, dtype, world_size, layout)
print(json.dumps(out))
"""
TORCHRUN = """
import torch.distributed as dist

rank, folder, out = int(os.environ["RANK"]), sys.argv[1], {}
for world_size in SIZES:
    if rank >= world_size:
        continue
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet{world_size}", rank=rank, world_size=world_size
    )
    comm.init_process_group()
    assert comm.get_world_size() == world_size and comm.get_world() == "gloo"
    for name, dtype in PLANS:
        for stage in STAGES:
            with VirtualGPU():
                result = train(name, make_config(stage, dtype), dtype)
            out[case(name, dtype, stage, world_size)] = facts(result)
    comm.destroy_process_group()
with open(f"{folder}/rank{rank}.json", "w") as file:
    json.dump(out, file)
"""


def builder():
    spec = importlib.util.spec_from_file_location("course_build", ROOT / "course" / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def solved(target, build):
    """Return the function or class of an exercise, as the solution's cell defines it."""
    text = build.find_exercise(target).answer
    file = f"<solution {target}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace = {"__name__": "__main__"}
    exec(compile(text, file, "exec"), namespace)
    return namespace[target.partition(":")[2].partition(".")[0]]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder, build = tmp_path_factory.mktemp("finished"), builder()
    plug.reset()
    try:
        for found in exercise.every():
            plug.plug(found.target, solved(found.target, build), verified=True)
        own_copy.my_zerolab(folder)
    finally:
        plug.reset()
    runs = (ROOT / "tests" / "stage_runs.py").read_text()
    (folder / "my_stage_runs.py").write_text(re.sub(r"\bzerolab\b(?!\")", "my_zerolab", runs))
    constants = f"SIZES, STAGES, PLANS = {SIZES}, {STAGES}, {PLANS}\n"
    for name, body in (("lockstep.py", LOCKSTEP), ("processes.py", TORCHRUN)):
        (folder / name).write_text(PREAMBLE + constants + body)
    return folder


def run(folder, *words):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    env.pop("ZEROLAB_WORLD", None)
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def lockstep(copy):
    return json.loads(run(copy, "lockstep.py").splitlines()[-1])


@pytest.fixture(scope="module")
def processes(copy):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", str(max(SIZES)))
    run(copy, *launcher, "processes.py", str(copy))
    return [json.loads((copy / f"rank{rank}.json").read_text()) for rank in range(max(SIZES))]


def cases(results):
    """Yield (model, dtype, stage, world size, what the ranks showed)."""
    for key, ranks in results.items():
        if not key.startswith("spec"):
            name, dtype, _, stage, _, world_size = key.split()
            yield name, dtype, int(stage), int(world_size), ranks


def test_the_copy_is_the_learners(copy):
    for found in exercise.every():
        module = found.target.partition(":")[0].partition(".")[2].replace(".", "/")
        header = (copy / "my_zerolab" / f"{module}.py").read_text().split('"""')[0]
        assert found.name.partition(".")[0] in header and "yours" in header
    assert "my_zerolab" not in sys.modules


def test_equal_bits_at_every_stage(lockstep):
    for name, dtype, stage, world_size, ranks in cases(lockstep):
        expected = lockstep[f"spec {name} {dtype} {world_size}"]
        for rank in ranks:
            assert rank["losses"] == expected["losses"], (name, dtype, stage, world_size)
            assert rank["params"] == expected["params"], (name, dtype, stage, world_size)


def test_exact_bytes_at_every_stage(lockstep):
    for _, dtype, stage, world_size, ranks in cases(lockstep):
        width = 2 if dtype == "bf16" else 4
        for rank in ranks:
            c, held = rank["counts"], rank["state_bytes"]
            padded, share = c["padded"], c["padded"] // world_size
            assert held["param"] == width * (padded + c["frozen"]) // (
                world_size if stage == 3 else 1
            )
            assert held["grad"] == width * (share if stage >= 2 else padded)
            master = share if stage >= 1 else padded
            assert held["master"] == (4 * master if dtype == "bf16" else 0)
            own, pieces = c["own"] - c["idle"], c["segments"] - c["idle_segments"]
            assert held["optimizer"] == 8 * own + 4 * pieces


def test_exact_traffic_at_every_stage(lockstep):
    for name, _, stage, _, ranks in cases(lockstep):
        for rank in ranks if name == "gpt-nano" else []:  # all of its parameters are trained
            psi = rank["counts"]["padded"]
            expected = {"reduce_scatter": psi, "all_gather": psi * (2 if stage == 3 else 1)}
            assert rank["traffic"][-1] == (expected if stage else {"all_reduce": psi})


def test_torchrun_gives_the_bits_bytes_and_traffic_of_lockstep(lockstep, processes):
    seen = 0
    for number, results in enumerate(processes):
        for key, facts in results.items():
            assert facts == lockstep[key][number], (key, number)
            seen += 1
    assert seen == len(PLANS) * len(STAGES) * sum(SIZES)
