"""torch.cuda's memory counters on the CPU, from the operating system's figures for the process.

    held = bytes that malloc has given out since the start        tensors, and larger objects of Python
    peak = held at the reset + growth of the resident memory from the reset to its highest since, without mapped files

Resident memory includes freed memory that malloc keeps; the reset returns it to the system. This needs Linux with
glibc. Elsewhere, only the peak of the whole process since its start is known.
"""

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["HostMemory"]

PROCESS = Path("/proc/self")


class HostMemory:
    """Memory that the process has used since this object was made."""

    def __init__(self) -> None:
        self._malloc = _malloc()
        self._start = self._given_out()
        self._held, self._at_reset = 0, (0, 0, 0)
        self.resets = self.reset_peak()

    @property
    def note(self) -> str:
        """What the counters count."""
        if self.resets:
            return "memory counters of torch.cuda are those of the process, which holds more than tensors"
        return "memory counters of torch.cuda are the peak of the whole process since its start"

    def held(self) -> int:
        """Return the number of bytes in use."""
        return max(0, self._given_out() - self._start) if self.resets else self.peak()

    def peak(self) -> int:
        """Return the peak number of bytes in use since the last reset."""
        if not self.resets:
            return _peak_of_the_process()
        resident, highest, mapped = _resident()
        resident_then, _, mapped_then = self._at_reset
        grown = highest - resident_then - max(0, mapped - mapped_then)
        held = self.held()
        return max(self._held + grown, held, held + highest - resident)

    def reset_peak(self) -> bool:
        """Reset `peak` to the current memory; return whether the operating system supports that."""
        if self._malloc is None:
            return False
        self._malloc.malloc_trim(0)
        try:
            (PROCESS / "clear_refs").write_text("5")  # see proc(5): resets the highest resident memory
        except OSError:
            return False
        self._held, self._at_reset = max(0, self._given_out() - self._start), _resident()
        return True

    def _given_out(self) -> int:
        info = None if self._malloc is None else self._malloc.mallinfo2()
        return 0 if info is None else int(info.uordblks + info.hblkhd)

    @staticmethod
    def of_the_machine() -> tuple[int, int]:
        """Return the free and all bytes of the machine's memory, or zeros where the system does not say."""
        if os.name != "posix":
            return 0, 0
        page = os.sysconf("SC_PAGE_SIZE")
        free = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
        return page * free, page * os.sysconf("SC_PHYS_PAGES")


class _MallInfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def _malloc() -> ctypes.CDLL | None:
    """Return the C library if it counts what malloc has given out."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _MallInfo2
    return library


def _resident() -> tuple[int, int, int]:
    """Return the resident bytes of the process now, at most since the last reset, and now in mapped files."""
    lines = (line.split() for line in (PROCESS / "status").read_text().splitlines())
    kilobytes = {words[0]: words[1] for words in lines if len(words) > 1}
    now, highest, mapped = (int(kilobytes.get(name, "0")) * 1024 for name in ("VmRSS:", "VmHWM:", "RssFile:"))
    return now, highest, mapped


def _peak_of_the_process() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
