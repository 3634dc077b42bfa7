"""Files that outlast a full disk, a killed process and a second one: a reader finds the old content or the new.

setup.py runs this file by path, so it imports nothing but the standard library. What is read is data, never code, of
bounded size, and taken for hostile: a file that is not what it should be raises ``ValueError`` naming it.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: two processes are not kept apart there
    fcntl = None  # type: ignore[assignment]

MIB = 1 << 20
_TEMPORARY = re.compile(r"tmp-\d+-[0-9a-f]{8}(-old)?")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of some network file systems


def write_text(path: Path, text: str) -> None:
    """Replace a file's content by a text; see ``write_bytes``."""
    write_bytes(path, text.encode())


def write_figure(path: Path, figure: Any) -> None:
    """Replace a PNG by what a matplotlib figure shows; see ``write_bytes``."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_bytes(path, image.getvalue())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content as a whole; on a failure the old content stays and nothing is left over.

    The file keeps its permissions; a new one has what the umask leaves. A symbolic link is replaced, not followed:
    whoever put it there does not choose what else of ours is overwritten.

    Raises:
        OSError: it cannot be written, or what is there is neither a regular file nor a link.
    """
    mode = _mode_of(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    created = 0o666 if mode is None else mode  # at no time open to more people than the old file
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, created), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None and _mode_of(temporary) != mode:  # the umask took some of it
            temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)


def _mode_of(path: Path) -> int | None:
    """Permissions of a regular file, None where there is none."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        return None
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "expected a regular file", str(path))
    return mode & 0o777


def remove(path: Path) -> None:
    """Delete a file or a folder with all that is in it. Links are deleted themselves, never what they lead to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Fill a folder that appears as ``target``, whole, when the block ends; not at all when it raises.

    Of several processes only one may do this in a place at a time (``locked``): leavings of killed ones are removed,
    unless a link leads to the place.
    """
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in [] if folder.is_symlink() else folder.iterdir():
        if _TEMPORARY.fullmatch(left_over.name):
            _try_to_remove(left_over)
    temporary = target.with_name(f"tmp-{os.getpid()}-{secrets.token_hex(4)}")
    old = target.with_name(f"{temporary.name}-old")
    temporary.mkdir()
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            flush(path)
        if os.path.lexists(target):
            target.rename(old)
        try:
            temporary.rename(target)
        except OSError:
            if os.path.lexists(old):
                old.rename(target)
            raise
    finally:
        for left_over in (temporary, old):
            _try_to_remove(left_over)
    flush(folder)


def _try_to_remove(path: Path) -> None:
    with suppress(OSError):
        remove(path)


def flush(path: Path) -> None:
    """Ask the system to put a file, or a folder's list of names, on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # can't be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a file's lock, which ends with the process at the latest; the file is made where there is none.

    Args:
        path: the file that stands for what is locked.
        wait: until another process gives the lock up; else the block runs without it.

    Yields:
        False: another process has the lock. True also where there are no locks (Windows, some network file systems).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        held = True
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                held = False
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        yield held
        if held and fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing does not where a forked child holds a copy
    finally:
        os.close(descriptor)


def append_records(path: Path, records: Iterable[Any]) -> None:
    """Append JSON lines: all of them or, on a full disk, none; a line that a killed process left unfinished is cut."""
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    with locked(path, wait=True), path.open("r+b", buffering=0) as file:
        end = _end_of_lines(file)
        file.seek(end)
        if _is_json(tail := file.read()):  # of a file that was written by hand
            lines, end = b"\n" + lines, end + len(tail)
        try:
            file.truncate(end)
            file.seek(end)
            while lines:
                lines = lines[file.write(lines) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def _end_of_lines(file: Any) -> int:
    """Where the last finished line ends."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - 4096)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return int(begin + found + 1)
        end = begin
    return 0


def _is_json(text: bytes) -> bool:
    try:
        parse_json(text.decode("utf-8"))
    except ValueError:
        return False
    return True


def read_text(path: Path, most: int = 64 * MIB, *, own: bool = False) -> str:
    """Read a text; see ``read_bytes``.

    Raises:
        OSError: it is not there, or may not be read.
        ValueError: it is not UTF-8, or for the reasons of ``read_bytes``.
    """
    try:
        return read_bytes(path, most, own=own).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_bytes(path: Path, most: int = 64 * MIB, *, own: bool = False) -> bytes:
    """Read a regular file of at most ``most`` bytes; ``own``: one of this user's.

    Raises:
        OSError: it is not there, or may not be read.
        ValueError: it is no regular file (which may never end), somebody else's, or larger than that.
    """
    # A FIFO without a writer would block an open that may block.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: expected a regular file")
        if own and hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise ValueError(f"{path}: expected a file of user {os.getuid()}, got one of user {status.st_uid}")
        if status.st_size > most:
            raise ValueError(f"{path}: expected at most {most:,} bytes, got {status.st_size:,}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)


def read_json(path: Path, most: int = 64 * MIB, *, own: bool = False) -> Any:
    """Read a JSON file; see ``read_text``.

    Raises:
        OSError: it is not there, or may not be read.
        ValueError: it is not JSON, or for the reasons of ``read_text``.
    """
    text = read_text(path, most, own=own)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error


def parse_json(text: str) -> Any:
    """Parse JSON; text that is nested too deeply is an error like any other.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_records(
    path: Path, most: int = 1024 * MIB, *, own: bool = False, bad: Callable[[ValueError], None] | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) of JSON lines; a last line that a killed process left unfinished is passed over.

    Args:
        path: the file.
        most: bytes that it may have.
        own: whether it has to be this user's.
        bad: is told of a line that is not JSON, which is then passed over; None: that is an error.

    Raises:
        OSError: the file is not there, or may not be read.
        ValueError: a line is not JSON, with its number, or for the reasons of ``read_bytes``.
    """
    *finished, last = read_bytes(path, most, own=own).split(b"\n")
    for number, line in enumerate(finished, 1):
        try:
            value = parse_json(line.decode("utf-8"))
        except ValueError as error:
            told = f"{path}:{number}: not valid JSON ({error}), got {line[:60].decode('utf-8', 'replace')!r}"
            if bad is None:
                raise ValueError(told) from error
            bad(ValueError(told))
            continue
        yield number, value
    try:  # a file that was written by hand may lack the last line's end
        value = parse_json(last.decode("utf-8")) if last else None
    except ValueError:
        return
    if last:
        yield len(finished) + 1, value
