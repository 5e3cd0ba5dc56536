"""The text and its batches: every world size sees the same samples, in the same order."""

import itertools

import pytest
import torch

from zerolab import data, device
from zerolab.errors import UsageError

TEXT = bytes(range(256)) * 4


def first_batches(count, *, text=TEXT, rank=0, world_size=1, micro=4, seq_len=8, seed=0):
    stream = data.batches(text, rank, world_size, micro, seq_len, seed)
    return list(itertools.islice(stream, count))


@pytest.mark.parametrize("text", ["", "plain", "na\u00efve \u8fdb\u7a0b \U0001f600", "a\nb\x00"])
def test_decode_undoes_encode(text):
    tokens = data.encode(text)
    assert tokens.dtype == torch.int64
    assert len(tokens) == len(text.encode())
    assert data.decode(tokens) == text
    assert data.decode(tokens.tolist()) == text


def test_decode_survives_half_a_character():
    assert data.decode(data.encode("\u8fdb")[:2]) == "\ufffd"


def test_the_shipped_text_is_a_novel_of_some_hundred_kilobytes():
    text = data.load_text()
    assert 200_000 < len(text) < 1_000_000
    assert text.startswith(b"Persuasion")
    assert text.isascii()


def test_load_text_reads_any_bytes(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe\x00text")
    assert data.load_text(path) == b"\xff\xfe\x00text"
    assert data.load_text(str(path)) == data.load_text(path)


def test_targets_are_the_tokens_one_further_on():
    (tokens, targets), *_ = first_batches(1)
    assert tokens.shape == targets.shape == (4, 8)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (tokens + 1) % 256)  # TEXT counts upwards
    assert tokens.is_contiguous()
    assert targets.is_contiguous()


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 12])
def test_all_ranks_together_see_what_one_rank_alone_sees(world_size):
    alone = first_batches(3, micro=12)
    ranks = [
        first_batches(3, rank=rank, world_size=world_size, micro=12 // world_size)
        for rank in range(world_size)
    ]
    for step, (tokens, targets) in enumerate(alone):
        assert torch.equal(torch.cat([rank[step][0] for rank in ranks]), tokens)
        assert torch.equal(torch.cat([rank[step][1] for rank in ranks]), targets)


def test_two_micro_batches_show_what_one_twice_as_large_shows():
    (large, _), *_ = first_batches(1, micro=4)
    small = first_batches(2, micro=2)
    assert torch.equal(torch.cat([tokens for tokens, _ in small]), large)


def test_a_batch_counts_as_input_on_a_virtual_gpu():
    stream = data.batches(TEXT, 0, 1, 4, 8, 0)
    with device.VirtualGPU() as gpu:
        tokens, targets = next(stream)
        assert gpu.by_kind()["input"] >= tokens.nbytes + targets.nbytes
        assert set(gpu.by_kind()) == {"input"}


def test_batches_depend_on_the_seed_and_on_nothing_else():
    torch.manual_seed(1)
    one = first_batches(2, seed=5)
    torch.manual_seed(2)
    again, other = first_batches(2, seed=5), first_batches(2, seed=6)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0][0], other[0][0])


def test_every_window_of_the_text_can_be_drawn():
    starts = {data.window_start(0, sample, 7) for sample in range(200)}
    assert starts == set(range(7))


def test_a_text_of_exactly_one_sample_is_enough():
    (tokens, targets), *_ = first_batches(1, text=b"abc", micro=1, seq_len=2)
    assert data.decode(tokens[0]) == "ab"
    assert data.decode(targets[0]) == "bc"


def test_a_short_text_is_refused_before_the_first_batch():
    with pytest.raises(UsageError, match=r"3 bytes.*seq_len \+ 1 = 4"):
        data.batches(b"abc", 0, 1, 1, 3, 0)


@pytest.mark.parametrize("bad", [{"micro": 0}, {"seq_len": -2}])
def test_counts_below_one_are_refused(bad):
    with pytest.raises(UsageError, match="below 1"):
        first_batches(1, **bad)


def test_files_that_cannot_be_read_are_usage_errors(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    for path, says in [(tmp_path / "none", "no such file"), (tmp_path, "."), (empty, "is empty")]:
        with pytest.raises(UsageError, match=says) as raised:
            data.load_text(path)
        assert path.name in str(raised.value)
        assert "\n" not in str(raised.value)
