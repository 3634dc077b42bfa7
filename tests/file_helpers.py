"""What the tests of files share: work that is killed anywhere or meets a full disk, and hostile content.

A forked child does the work: an audit hook kills it at the n-th file operation, or a limit on file sizes stands for the
full disk. What is left on the disk is then read by the parent.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

resource = pytest.importorskip("resource", reason="no POSIX system")

HOSTILE: list[Any] = [
    None, True, -1, 10**30, 1e308, float("nan"), "", "x", "../../x", [], [[]], {}, {"a": 1}, 10**400
]  # fmt: skip
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "fcntl.flock", "shutil.rmtree")


def start(work: Callable[[], object]) -> int:
    """Do work in a child; its exit status is 0, or 1 after an OSError."""
    if child := os.fork():
        return child
    status = 2
    try:
        work()
        status = 0
    except OSError:
        status = 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def finish(child: int) -> int:
    """Return a child's exit status, the negative signal where one killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_everywhere(work: Callable[[], object]) -> Iterator[int]:
    """Kill work at its first file operation, then at its second, and so on until it is done; yield each time."""
    for number in range(1, 500):

        def doomed(number: int = number) -> None:
            seen = 0

            def hook(event: str, _: object) -> None:
                nonlocal seen
                seen += event in FILE_EVENTS
                if seen == number:
                    signal.raise_signal(signal.SIGKILL)

            sys.addaudithook(hook)
            work()

        status = finish(start(doomed))
        assert status in (0, -signal.SIGKILL)
        yield number
        if status == 0:
            assert number > 2, "nothing was interrupted"
            return
    pytest.fail("the work never came to an end")


def on_a_full_disk(work: Callable[[], object], room: int) -> int:
    """Do work where no file may grow beyond so many bytes."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        work()

    return finish(start(limited))


def mutations(text: str, count: int) -> Iterator[bytes]:
    """Texts with a byte changed, a part lost or doubled; always the same."""
    chance = random.Random(0)
    data = text.encode()
    for _ in range(count):
        at, to = sorted(chance.choices(range(len(data)), k=2))
        yield chance.choice(
            [
                data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
                data[:at],
                data[:at] + data[to:],
                data[:to] + data[at:],
            ]
        )


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a JSON value are."""
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*at, key))


def replaced(value: Any, at: tuple[Any, ...], by: Any) -> Any:
    """A copy with one value replaced."""
    if not at:
        return by
    made = copy.copy(value)
    made[at[0]] = replaced(value[at[0]], at[1:], by)
    return made


def assert_same(now: Any, before: Any) -> None:
    assert type(now) is type(before)
    if isinstance(now, torch.Tensor):
        assert now.dtype == before.dtype
        assert torch.equal(now, before)
    elif isinstance(now, dict | list | tuple):
        assert len(now) == len(before)
        for key in now if isinstance(now, dict) else range(len(now)):
            assert_same(now[key], before[key])
    else:
        assert now == before
