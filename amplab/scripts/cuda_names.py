"""The public names of ``torch.cuda``, and what each does while CUDA calls run on the CPU: the one list of them.

    ANSWERS    a constant                  is_available() -> True
    IDLE       nothing                     synchronize()
    REFUSED    raises a RuntimeError that says what to use instead
    HARMLESS   is not replaced, and works as it is

`cuda_on_cpu` reads these tables, and has replacements of its own for streams, events, generators, memory counters,
tensor types and autocast. A name of a submodule is written with it: ``nvtx.mark``. A test compares the tables with
torch.
"""

from typing import Any

__all__ = ["ANSWERS", "CUDA_VERSION", "CUDNN_VERSION", "DEVICE_NAME", "HARMLESS", "IDLE", "REFUSED", "refusal_of"]

DEVICE_NAME = "CPU (in place of CUDA)"
CUDA_VERSION, CUDNN_VERSION = "12.6", 90501
"""What ``torch.version.cuda`` and ``torch.backends.cudnn.version()`` say where torch is built without CUDA."""

ANSWERS: dict[str, Any] = {
    "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
    "is_current_stream_capturing": False, "can_device_access_peer": False, "get_device_capability": (7, 0),
    "get_device_name": DEVICE_NAME, "is_bf16_supported": True, "is_tf32_supported": False, "get_arch_list": ["sm_70"],
    "get_gencode_flags": "", "get_sync_debug_mode": 0, "get_allocator_backend": "native",
    "nccl.version": (2, 21, 5),  # with CUDA_VERSION in torch's own builds
    "get_per_process_memory_fraction": 1.0,
}  # fmt: skip

IDLE = (
    "init", "synchronize", "empty_cache", "ipc_collect", "set_device", "set_stream", "set_per_process_memory_fraction",
    "set_sync_debug_mode", "caching_allocator_enable", "nvtx.range_push", "nvtx.range_pop", "nvtx.range_start",
    "nvtx.range_end", "nvtx.mark", "profiler.start", "profiler.stop",
)  # fmt: skip

_GRAPHS = "call the model directly, or use torch.compile"
_PROCESSES = "use torch.distributed, whose backend nccl is gloo here"
_ALLOCATOR = "make tensors with torch.empty; the memory of the CPU has no pools"
_SENSORS = "test for `torch.cuda.get_device_name()` and skip this line; the CPU has no such sensor"
_HANDLES = "use ops of torch; there is no CUDA runtime to give handles of"
_STREAMS = "use torch.cuda.Stream(), which does nothing here"
_TUNING = "skip this line; it chooses among kernels of a GPU"
_FILES = "use torch.load, or numpy.memmap"

REFUSED = {
    **dict.fromkeys(("CUDAGraph", "graph", "graph_pool_handle", "make_graphed_callables"), _GRAPHS),
    **dict.fromkeys(
        ("caching_allocator_alloc", "caching_allocator_delete", "CUDAPluggableAllocator", "change_current_allocator",
         "MemPool", "memory_snapshot", "use_mem_pool"),
        _ALLOCATOR,
    ),
    **dict.fromkeys(
        ("clock_rate", "device_memory_used", "list_gpu_processes", "memory_usage", "power_draw", "temperature",
         "utilization"),
        _SENSORS,
    ),
    **dict.fromkeys(("check_error", "cudart", "current_blas_handle", "current_solver_handle"), _HANDLES),
    **dict.fromkeys(("ExternalStream", "GreenContext", "get_stream_from_external"), _STREAMS),
    **{f"nccl.{name}": _PROCESSES for name in (
        "all_gather", "all_reduce", "broadcast", "init_rank", "reduce", "reduce_scatter", "unique_id",
    )},
    **{
        f"comm.{name}": _PROCESSES
        for name in ("broadcast", "broadcast_coalesced", "gather", "reduce_add", "reduce_add_coalesced", "scatter")
    },
    **{
        f"tunable.{name}": _TUNING
        for name in (
            "enable", "get_filename", "get_max_tuning_duration", "get_max_tuning_iterations", "get_results",
            "get_rotating_buffer_size", "get_validators", "is_enabled", "mgpu_tune_gemm_in_file", "read_file",
            "record_untuned_enable", "record_untuned_is_enabled", "set_filename", "set_max_tuning_duration",
            "set_max_tuning_iterations", "set_numerical_check_tolerances", "set_rotating_buffer_size",
            "tune_gemm_in_file", "tuning_enable", "tuning_is_enabled",
        )
    },
    **{f"gds.{name}": _FILES for name in ("GdsFile", "gds_deregister_buffer", "gds_register_buffer")},
}  # fmt: skip

_MODULES = (
    "amp", "comm", "gds", "graphs", "green_contexts", "jiterator", "memory", "nccl", "nvtx", "profiler", "random",
    "sparse", "streams", "tunable",
)  # fmt: skip

HARMLESS = {
    **dict.fromkeys(_MODULES, "a module; its names have their own entries"),
    **dict.fromkeys(
        ("AcceleratorError", "CudaError", "DeferredCudaCallError", "OutOfMemoryError", "cudaStatus"),
        "a class, for except clauses",
    ),
    **dict.fromkeys(("has_half", "has_magma"), "a constant"),
    **dict.fromkeys(("nvtx.range", "profiler.profile"), "calls names that do nothing here"),
    **dict.fromkeys(
        ("amp.autocast", "amp.GradScaler", "amp.custom_fwd", "amp.custom_bwd", "amp.amp_definitely_not_available"),
        "the name of torch.amp for CUDA, where autocast is redirected; the scaler works on the CPU",
    ),
    **{
        f"sparse.{name}Tensor": "a class; isinstance works, and calling it raises torch's own TypeError"
        for name in ("BFloat16", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
    },
}


def refusal_of(name: str) -> str:
    """Return what calling ``torch.cuda.<name>`` raises.

    >>> refusal_of("temperature").partition(":")[0]
    'torch.cuda.temperature'
    """
    return f"torch.cuda.{name}: not available under `amplab run --device cpu`; {REFUSED[name]}."
