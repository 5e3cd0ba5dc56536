"""Chapter 0: the virtual GPU, who holds which bytes, and when they run out.

Reading order:

    sizes       "160MiB" <-> bytes
    source      which line of the user's own source is responsible
    timeline    the memory events, compactly
    oom         the out-of-memory error
    ledger      the books: blocks, kinds, peak
    scopes      tag, in_phase, paused
    sharded     no reading of empty storages
    requests    what is refused before it runs
    tensor_cores 16-bit products in fp32, where the CPU cannot do them
    gpu         the virtual GPU: a ledger that sees every operation
    active      the GPU of the calling thread
    resize      the watch on storages that change their size
    host, cuda  host memory, copies, and the same on a real GPU
"""

from .active import current, ignore, in_phase, mark, name_storage, paused, set_kind, set_phase, tag
from .gpu import VirtualGPU
from .host import HostLedger, host, on_host, to_device, to_host
from .ledger import Ledger
from .sizes import format_bytes, parse_bytes
from .source import caller
from .timeline import Timeline

__all__ = [
    "HostLedger",
    "Ledger",
    "Timeline",
    "VirtualGPU",
    "caller",
    "current",
    "format_bytes",
    "host",
    "ignore",
    "in_phase",
    "mark",
    "name_storage",
    "on_host",
    "parse_bytes",
    "paused",
    "set_kind",
    "set_phase",
    "tag",
    "to_device",
    "to_host",
]
