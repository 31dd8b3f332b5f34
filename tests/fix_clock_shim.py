"""A time of day that tests can set, for a server of their own: a library that the server loads before any other.

`SteppedClock.environment` makes a child process read its time of day through the library, which adds as many
milliseconds as the clock's file says; the file may change while the server runs. Clocks that count durations are left
alone. The library is C, built with the machine's compiler when it is first needed. Used by the test's thread.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import fix_stores

from leaselib._model import from_ms

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Milliseconds to add to the time of day, in a file that the test changes; NULL: none. */
static const volatile int64_t *step_ms;

__attribute__((constructor)) static void map_the_file(void) {
    const char *path = getenv("LEASELIB_TEST_CLOCK");
    if (path == NULL) return;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) step_ms = page;
    close(file);
}

static int is_time_of_day(clockid_t id) {
    return id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
}

int clock_gettime(clockid_t id, struct timespec *out) {
    long failed = syscall(SYS_clock_gettime, id, out);
    if (failed == 0 && step_ms != NULL && is_time_of_day(id)) {
        int64_t step = *step_ms;
        int64_t nanoseconds = out->tv_nsec + (step % 1000) * 1000000;
        out->tv_sec += step / 1000;
        if (nanoseconds < 0) { nanoseconds += 1000000000; out->tv_sec -= 1; }
        if (nanoseconds >= 1000000000) { nanoseconds -= 1000000000; out->tv_sec += 1; }
        out->tv_nsec = nanoseconds;
    }
    return (int)failed;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
    if (out != NULL) { out->tv_sec = now.tv_sec; out->tv_usec = now.tv_nsec / 1000; }
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0) return (time_t)-1;
    if (out != NULL) *out = now.tv_sec;
    return now.tv_sec;
}
"""
WHAT_TO_INSTALL = (
    "moving a server's clock needs Linux and a C compiler: install one (Debian: apt-get install gcc libc6-dev), or "
    "name it in the variable CC"
)


def compiler() -> str | None:
    """The C compiler, or None."""
    given = os.environ.get("CC")
    return given or next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


@functools.cache
def library() -> Path:
    """The built library; made once, in a folder that goes when the session ends.

    Raises:
        AssertionError: it can't be built; says what to install.
    """
    cc = compiler()
    assert sys.platform == "linux", WHAT_TO_INSTALL
    assert cc is not None, WHAT_TO_INSTALL
    folder = Path(tempfile.mkdtemp(prefix="leaselib-clock-"))
    folder.chmod(0o755)  # servers may run as another user
    fix_stores.at_session_end.callback(shutil.rmtree, folder, ignore_errors=True)
    source, built = folder / "clock.c", folder / "clock.so"
    source.write_text(SOURCE)
    done = subprocess.run(
        [cc, "-shared", "-fPIC", "-O1", "-o", built, source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{WHAT_TO_INSTALL}. {cc} said: {done.stderr[-1500:]}"
    return built


class SteppedClock:
    """A server's time of day (fix_stores.StoreClock). Time also passes by itself.

    Args:
        folder: where its file is kept; of the user that the server runs as, or readable by it.
        settle: called after each step; returns once the server shows the new time, if it keeps a copy of the old one.
    """

    def __init__(self, folder: Path, settle: Callable[[], None] = lambda: None) -> None:
        self.settle = settle
        self._file = folder / "clock"
        self._step_ms = 0
        self._file.write_bytes(struct.pack("=q", 0))
        self._file.chmod(0o644)

    @property
    def environment(self) -> dict[str, str]:
        """What a server's environment needs, so that it reads this clock."""
        return {"LD_PRELOAD": str(library()), "LEASELIB_TEST_CLOCK": str(self._file)}

    def advance(self, seconds: float) -> None:
        """See StoreClock. To a server's time of day it is the same as a step."""
        self.step(seconds)

    def step(self, seconds: float) -> None:
        """See StoreClock."""
        self._step_ms += round(seconds * 1000)
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", self._step_ms))
        self.settle()

    def now(self) -> datetime:
        """See StoreClock."""
        return from_ms(time.time_ns() // 1_000_000 + self._step_ms)
