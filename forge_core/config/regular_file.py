"""Reading files that may be anything: a pipe that never ends, a device, more than memory holds."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular_file(path: Path, limit: int, *, follow_link: bool = True) -> bytes:
    """The content of a file.

    Args:
        limit: bytes; more are not read.
        follow_link: whether ``path`` itself may be a link.

    Raises:
        OSError: it cannot be read, is something other than a file, or is larger; ``strerror`` says which.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe is opened at once, and then refused
    try:
        descriptor = os.open(path, flags if follow_link else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_link:
            raise OSError(error.errno, "it is a link, not a file of its own", str(path)) from None
        raise
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a file", str(path))
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit / 2**20:g} MiB, the most that is read", str(path))
    return content
