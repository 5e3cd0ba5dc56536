"""The oracle: an independent count of bytes below torch's dispatcher, for tests only.

`build` compiles `allocator.cpp` (g++ and torch's headers, two seconds), `Oracle` installs it in
this process, for good. Use it in a process of its own, as `compare.py` does.
"""

import contextlib
import ctypes
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent


def build(folder):
    """Compile the allocator into `folder` and return the library's path."""
    library = Path(folder) / "liboracle.so"
    options = ["-O1", "-shared", "-fPIC", "-std=c++20"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    paths = [f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}", "-lc10"]
    source = str(HERE / "allocator.cpp")
    subprocess.run(["g++", *options, abi, source, "-o", str(library), *paths], check=True)
    return library


class Oracle:
    """The installed allocator. Bytes belong to the device of the thread that allocates them."""

    def __init__(self, library):
        self.library = ctypes.CDLL(str(library))
        for name in ("oracle_current", "oracle_peak"):
            getattr(self.library, name).restype = ctypes.c_int64
        self.library.oracle_install()

    @contextlib.contextmanager
    def on(self, device):
        """Count what this thread allocates as the device's; -1 for not at all."""
        before = self.library.oracle_get_device()
        self.library.oracle_set_device(device)
        try:
            yield
        finally:
            self.library.oracle_set_device(before)

    def current(self, device):
        """Bytes held now."""
        return self.library.oracle_current(device)

    def peak(self, device):
        """The most bytes held since `reset_peak`."""
        return self.library.oracle_peak(device)

    def reset_peak(self, device):
        """Start looking for a new peak."""
        self.library.oracle_reset_peak(device)
