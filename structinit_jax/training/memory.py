"""Device memory, where the backend reports it: GPUs and TPUs do, CPUs do not."""

import jax


def describe() -> str:
    """Such as ', 1.2 GiB in use, at most 3.4 of 79.6 GiB'; empty where nothing is reported.

    Of this process's first device; the others hold as much. The peak is since the process started.
    """
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "peak_bytes_in_use" not in stats:
        return ""
    in_use, peak = (stats[key] / 2**30 for key in ("bytes_in_use", "peak_bytes_in_use"))
    limit = f" of {stats['bytes_limit'] / 2**30:.1f}" if "bytes_limit" in stats else ""
    return f", device memory {in_use:.2f} GiB in use, at most {peak:.2f}{limit} GiB"
