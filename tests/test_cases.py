"""Every kind of model on which a public engine failed: equal to torch, or a clear error."""

import pytest
import torch
from case_api import CASES, DDPAPI, EngineAPI, PlainAPI, difference, load, run_case

from zerolab import comm
from zerolab.errors import RankError

FP32_TOLERANCE = 3e-5


def plainly(path):
    return run_case(path, PlainAPI)


_EXPECTED = {}


def expected(case, path, world_size):
    """What torch gives: one process with the whole batch, or DDP of the same world size."""
    key = (path, world_size if case.ORACLE == "ddp" else 0)
    if key not in _EXPECTED:
        if case.ORACLE == "ddp" and world_size > 1:
            results = comm.run(_ddp, world_size, "gloo", args=(str(path),), timeout=60)
            _EXPECTED[key] = results[0]
        else:
            _EXPECTED[key] = plainly(path)
    return _EXPECTED[key]


def _ddp(path):
    return run_case(path, DDPAPI)


def _engine(path, stage):
    return run_case(path, EngineAPI, stage=stage)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case_equals_torch_or_is_refused_clearly(path, stage, world_size):
    case = load(path)
    try:
        results = comm.run(_engine, world_size, args=(str(path), stage), timeout=60)
    except (ValueError, RankError) as error:
        assert case.ORACLE == "either", error
        assert any(word in str(error).lower() for word in case.ERROR), error
        return
    tolerance = case.make_case()[1].get("tol", FP32_TOLERANCE)
    wanted = expected(case, path, world_size)
    for result in results:
        gap, where = difference(wanted, result)
        assert gap <= tolerance, where
        if hasattr(case, "check"):
            case.check(result)
        for name, value in results[0]["params"].items():
            assert torch.equal(value, result["params"][name]), f"ranks differ in {name}"


IN_PROCESSES = ("002a", "004", "023", "025", "109", "110", "113")


def test_cases_in_the_process_world_equal_the_lockstep_world():
    for path in CASES:
        if load(path).ID not in IN_PROCESSES:
            continue
        for stage in (1, 3):
            try:
                threads = comm.run(_engine, 2, args=(str(path), stage), timeout=60)
            except RankError as error:
                with pytest.raises(type(error), match=r"different|mismatch|experts"):
                    comm.run(_engine, 2, "gloo", args=(str(path), stage), timeout=60)
                continue
            processes = comm.run(_engine, 2, "gloo", args=(str(path), stage), timeout=60)
            for thread, process in zip(threads, processes, strict=True):
                assert thread["losses"] == process["losses"], path.stem
                for name, value in thread["params"].items():
                    assert torch.equal(value, process["params"][name]), (path.stem, name)
