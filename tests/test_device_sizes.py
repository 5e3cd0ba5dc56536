"""Sizes in bytes: what users type and what they read."""

import pytest

from zerolab.device import format_bytes, parse_bytes
from zerolab.errors import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("160MiB", 160 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        (" 512 kib ", 2**19),
        ("2TiB", 2**41),
        ("100", 100),
        ("7B", 7),
        (123456789012345678, 123456789012345678),
        ("9007199254740993", 2**53 + 1),  # not through a float
    ],
)
def test_parse_bytes_reads_powers_of_1024(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ("160MB", r"'160MB'.*ambiguous, 10\*\*6 or 2\*\*20 bytes: write MiB"),
        ("4G", r"'4G'.*ambiguous.*write GiB"),
        ("1tb", r"ambiguous.*write TiB"),
        ("5 parsecs", "unknown unit 'parsecs': use KiB, MiB"),
        ("many", "not a number with a unit"),
        ("", "not a number"),
        (0, "0 must be at least one byte"),
        ("-3MiB", "'-3MiB' must be at least one byte"),
        ("0.5B", "must be at least one byte"),
        (1.5, "neither an int"),
        (True, "neither an int"),
        (None, "neither an int"),
    ],
)
def test_parse_bytes_refuses_and_says_what_to_write(size, says):
    with pytest.raises(UsageError, match=says):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (165632081, "157.96 MiB"),
        (-(2**20), "-1.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**42, "4.00 TiB"),
    ],
)
def test_format_bytes_writes_as_cuda_does(nbytes, text):
    assert format_bytes(nbytes) == text
