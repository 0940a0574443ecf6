"""A simulated accelerator for CPU builds of PyTorch: real values, computed on the CPU.

    from tests.support import fakegpu   # builds (once, ~15 s) and registers device type "fakegpu"
    fakegpu.set_capacity(64 << 20)
    model.to("fakegpu")
    torch.fakegpu.mem_get_info()        # CUDA-shaped module; torch.accelerator.* works too

With FAKEGPU_AS=cuda in the environment, and imported before torch, the device
type is "cuda" instead and torch.cuda.* answers for the simulated device.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

AS_CUDA = os.environ.get("FAKEGPU_AS") == "cuda"
NAME = "cuda" if AS_CUDA else "fakegpu"
_SOURCE = pathlib.Path(__file__).with_name("fakegpu.cpp")


def build():
    """Compile fakegpu.cpp, cached by source, torch version, compiler and flags; no torch import."""
    root = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if cxx is None:
        raise RuntimeError("fakegpu needs a C++20 compiler (g++ >= 11)")
    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-w",
        *(["-DFAKEGPU_AS_CUDA"] if AS_CUDA else []),
    ]
    ver = subprocess.run([cxx, "--version"], capture_output=True).stdout
    key = hashlib.sha256(
        b"\0".join(
            [
                _SOURCE.read_bytes(),
                importlib.metadata.version("torch").encode(),
                str(root).encode(),
                ver,
                " ".join(flags).encode(),
            ]
        )
    ).hexdigest()[:16]
    cache = pathlib.Path(
        os.environ.get("FAKEGPU_CACHE")
        or pathlib.Path(tempfile.gettempdir()) / "latentloom-fakegpu"
    )
    so = cache / f"libfakegpu-{key}.so"
    if so.exists():
        return so
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=cache
    ) as tmp:  # build aside, then rename: safe with pytest-xdist
        out = pathlib.Path(tmp) / so.name
        r = subprocess.run(
            [
                cxx,
                *flags,
                f"-I{root}/include",
                f"-I{root}/include/torch/csrc/api/include",
                str(_SOURCE),
                "-o",
                str(out),
                f"-L{root}/lib",
                "-ltorch_cpu",
                "-lc10",
                f"-Wl,-rpath,{root}/lib",
            ],
            capture_output=True,
            text=True,
        )
        if r.returncode:
            raise RuntimeError(f"fakegpu build failed:\n{r.stderr[-4000:]}")
        os.replace(out, so)
    return so


_so = str(build())
if AS_CUDA:
    if "torch" in sys.modules:
        raise RuntimeError("FAKEGPU_AS=cuda: import fakegpu before torch")
    ctypes.CDLL(
        str(
            pathlib.Path(importlib.util.find_spec("torch").origin).parent
            / "lib"
            / "libtorch_global_deps.so"
        ),
        ctypes.RTLD_GLOBAL,
    )
    _lib = ctypes.CDLL(_so)
import torch  # noqa: E402

if AS_CUDA and torch.version.cuda:
    raise RuntimeError("FAKEGPU_AS=cuda needs a CPU build of torch")
if not AS_CUDA:
    _lib = ctypes.CDLL(_so)
_i64, _int = ctypes.c_int64, ctypes.c_int
for _f, _args, _res in [
    ("set_device_count", [_int], None),
    ("set_capacity", [_int, _i64], None),
    ("set_external", [_int, _i64], None),
    ("set_caching", [_int], None),
    ("set_rounding", [_i64], None),
    ("fail_allocation", [_i64, _i64], None),
    ("set_bandwidth", [ctypes.c_double, ctypes.c_double, _int], None),
    ("set_async", [_int], None),
    ("set_poison", [_int], None),
    ("counters", [_int, ctypes.c_void_p], None),
    ("reset_counters", [_int], None),
    ("host_register", [ctypes.c_void_p, _i64], _int),
    ("host_unregister", [ctypes.c_void_p], _int),
    ("pinned_bytes", [], _i64),
    ("set_pinned_limit", [_i64], None),
    ("count_ops", [_int], None),
    ("op_counts", [ctypes.c_char_p, _i64], _i64),
    ("mirrored", [], _int),
    ("device_count", [], _int),
]:
    _fn = getattr(_lib, "fg_" + _f)
    _fn.argtypes, _fn.restype = _args, _res

_COUNTERS = (
    "h2d_bytes",
    "h2d_count",
    "h2d_pinned_bytes",
    "d2h_bytes",
    "d2h_count",
    "d2h_pinned_bytes",
    "d2d_bytes",
    "d2d_count",
    "p2p_bytes",
    "p2p_count",
    "nonblocking_count",
    "deferred_count",
    "ops",
    "transfer_ns",
)


def _index(device=None):
    if isinstance(device, int):
        return device
    i = torch.device(device).index if device is not None else None
    return torch._C._accelerator_getDeviceIndex() if i is None else i


def _as_signed(seed):
    """A seed 0..2**64-1 in the signed form that operator arguments have."""
    return seed - 2**64 if seed >= 2**63 else seed


# ---- controls for tests ------------------------------------------------------
def set_device_count(n):
    _lib.fg_set_device_count(n)


def set_capacity(nbytes, device=0):
    _lib.fg_set_capacity(_index(device), int(nbytes))


def set_external(nbytes, device=0):
    """Memory taken by 'other processes': lowers free memory, not the total."""
    _lib.fg_set_external(_index(device), int(nbytes))


def set_caching(on):
    """True (default): freed memory stays 'reserved' until empty_cache() or pressure."""
    _lib.fg_set_caching(int(on))


def set_rounding(nbytes=512):
    _lib.fg_set_rounding(nbytes)


def fail_allocation(after=0, times=1):
    """Make the allocation `after` allocations from now (and the `times`-1 next) raise OOM."""
    _lib.fg_fail_allocation(after, times)


def set_bandwidth(pageable=0.0, pinned=None, sleep=False):
    """bytes/s for host<->device copies; counted in counters()['transfer_ns'], slept if sleep."""
    _lib.fg_set_bandwidth(pageable, pageable if pinned is None else pinned, int(sleep))


def set_async(on):
    """Defer non_blocking copies of pinned memory until their stream is used or synchronised."""
    _lib.fg_set_async(int(on))


def set_poison(on):
    """Fill fresh device memory with 0xFF: reading what was never written shows up as NaN."""
    _lib.fg_set_poison(int(on))


def counters(device=0):
    buf = (_i64 * len(_COUNTERS))()
    _lib.fg_counters(_index(device), buf)
    return dict(zip(_COUNTERS, buf))


def reset_counters(device=0):
    _lib.fg_reset_counters(_index(device))


@contextlib.contextmanager
def transfers(device=0):
    """`with transfers() as t: ...` -> afterwards t holds the counters' change."""
    a, out = counters(device), {}
    yield out
    out.update({k: v - a[k] for k, v in counters(device).items()})


@contextlib.contextmanager
def op_counts():
    out = {}
    _lib.fg_count_ops(1)
    try:
        yield out
    finally:
        n = _lib.fg_op_counts(None, 0)
        buf = ctypes.create_string_buffer(n + 1)
        _lib.fg_op_counts(buf, n + 1)
        out.update(
            (k, int(v)) for k, v in (ln.split(" ") for ln in buf.value.decode().splitlines())
        )
        _lib.fg_count_ops(0)


def pinned_bytes():
    return _lib.fg_pinned_bytes()


def set_pinned_limit(nbytes=-1):
    _lib.fg_set_pinned_limit(nbytes)


def host_register(tensor):
    """Like cudaHostRegister on a tensor's storage; False if refused."""
    return bool(
        _lib.fg_host_register(
            tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        )
    )


def host_unregister(tensor):
    return bool(_lib.fg_host_unregister(tensor.untyped_storage().data_ptr()))


def reset():
    """Back to defaults (call from a pytest fixture); live tensors stay charged."""
    set_device_count(1)
    for d in range(8):
        _lib.fg_set_capacity(d, 8 << 30)
        _lib.fg_set_external(d, 0)
        _lib.fg_reset_counters(d)
    set_caching(True)
    set_rounding()
    fail_allocation(-1)
    set_bandwidth(0)
    set_async(False)
    set_poison(False)
    set_pinned_limit()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_accumulated_memory_stats()
    torch.accelerator.reset_peak_memory_stats()


# ---- a CUDA-shaped device module: torch.fakegpu, or laid over torch.cuda ------
class _Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kw):
        return super().__new__(
            cls, device=torch.device(NAME, _index(device)), priority=priority, **kw
        )


class _DeviceCtx:
    def __init__(self, device):
        self.idx = _index(device)

    def __enter__(self):
        self.prev = _index()
        torch.accelerator.set_device_index(self.idx)

    def __exit__(self, *exc):
        torch.accelerator.set_device_index(self.prev)


class _Module:
    device = _DeviceCtx
    OutOfMemoryError = torch.OutOfMemoryError
    Stream = _Stream

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def init(self):
        pass

    def _lazy_init(self):
        pass

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return _lib.fg_device_count()

    def current_device(self):
        return _index()

    def set_device(self, d):
        torch.accelerator.set_device_index(_index(d))

    def get_device_name(self, device=None):
        return "Simulated GPU"

    def get_device_capability(self, device=None):
        return (9, 0)

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self, including_emulation=True):
        return True

    def synchronize(self, device=None):
        torch.accelerator.synchronize(_index(device))

    def empty_cache(self):
        torch.accelerator.empty_cache()

    def ipc_collect(self):
        pass

    def cudart(self):
        """The driver calls that page-lock host memory in place."""
        from types import SimpleNamespace

        return SimpleNamespace(
            cudaHostRegister=lambda ptr, size, flags: 0 if _lib.fg_host_register(ptr, size) else 1,
            cudaHostUnregister=lambda ptr: 0 if _lib.fg_host_unregister(ptr) else 1,
        )

    def mem_get_info(self, device=None):
        return torch.accelerator.get_memory_info(_index(device))

    def memory_stats(self, device=None):
        return torch.accelerator.memory_stats(_index(device))

    def memory_allocated(self, device=None):
        return torch.accelerator.memory_allocated(_index(device))

    def max_memory_allocated(self, device=None):
        return torch.accelerator.max_memory_allocated(_index(device))

    def memory_reserved(self, device=None):
        return torch.accelerator.memory_reserved(_index(device))

    def max_memory_reserved(self, device=None):
        return torch.accelerator.max_memory_reserved(_index(device))

    def reset_peak_memory_stats(self, device=None):
        torch.accelerator.reset_peak_memory_stats(_index(device))

    def reset_accumulated_memory_stats(self, device=None):
        torch.accelerator.reset_accumulated_memory_stats(_index(device))

    def get_allocator_backend(self):
        return "native"

    def current_stream(self, device=None):
        return torch.accelerator.current_stream(_index(device))

    def set_stream(self, s):
        torch.accelerator.set_stream(s)

    def default_stream(self, device=None):
        return torch.Stream(stream_id=0, device_index=_index(device), device_type=_DEVICE_TYPE)

    def get_device_properties(self, device=None):
        from types import SimpleNamespace

        return SimpleNamespace(
            name="Simulated GPU",
            total_memory=self.mem_get_info(device)[1],
            major=9,
            minor=0,
            multi_processor_count=1,
        )

    def Event(self, enable_timing=False, blocking=False, interprocess=False):
        return torch.Event(device=NAME, enable_timing=enable_timing)

    @contextlib.contextmanager
    def stream(self, s):
        if s is None:
            yield
            return
        prev, here = self.current_stream(s.device), torch.accelerator.current_device_index()
        torch.accelerator.set_stream(s)  # which makes its device the current one, too
        try:
            yield
        finally:
            torch.accelerator.set_stream(prev)
            torch.accelerator.set_device_index(here)

    # random numbers: one default generator per device
    def manual_seed_all(self, seed):
        for i in range(self.device_count()):
            torch.ops.fakegpu_rng.seed(i, _as_signed(seed))

    def manual_seed(self, seed):
        torch.ops.fakegpu_rng.seed(_index(), _as_signed(seed))

    def initial_seed(self):
        return torch.ops.fakegpu_rng.initial_seed(_index())

    def get_rng_state(self, device=None):
        return torch.ops.fakegpu_rng.get_state(_index(device))

    def set_rng_state(self, state, device=None):
        torch.ops.fakegpu_rng.set_state(_index(device), state)


if AS_CUDA:
    _DEVICE_TYPE = torch._C._autograd.DeviceType.CUDA.value
    _m = _Module()
    for _n in dir(_m):
        if not _n.startswith("__"):
            for _t in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
                if _t is torch.cuda or hasattr(_t, _n):
                    setattr(_t, _n, getattr(_m, _n))

    def _restore(storage, location):  # a CPU build can't make UntypedStorage(device="cuda")
        if location.startswith("cuda"):
            return torch.empty(0, dtype=torch.uint8).set_(storage).to(location).untyped_storage()

    torch.serialization.register_package(1, lambda obj: None, _restore)
else:
    _DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1.value
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
