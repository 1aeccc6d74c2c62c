"""The filter of system calls with which sandboxed programs run, as classic BPF for the kernel's seccomp.

Namespaces and resource limits leave four ways out of the bounds, which it closes: further processes (each
would have memory of its own), memory outside of the address space (shared memory, files in memory, large
buffers of pipes and sockets), sockets (VSOCK reaches a virtual machine's host from every network namespace),
and parts of the kernel that have had many defects and that no ordinary program needs.
"""

from __future__ import annotations

import errno
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Offsets in the kernel's `struct seccomp_data`.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_THREAD = 0x00010000  # CLONE_THREAD
_X32 = 0x40000000  # first number of the x32 system calls
_SETPIPE_SZ = 1031  # F_SETPIPE_SZ

_CLONE3 = 435
# Refused on both: io_uring_*, open_tree to fspick, pidfd_getfd, mount_setattr, memfd_secret.
_SAME = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
# Architecture -> (its number in the kernel's audit.h, those of clone, of fcntl, and of refused calls).
# The numbers of calls are from the kernel's unistd.h.
_MACHINES: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        56,
        72,
        (
            *(41, 54, 57, 58),  # socket, setsockopt, fork, vfork
            *(29, 30, 31, 64, 68, 240, 319),  # shmget, shmat, shmctl, semget, msgget, mq_open, memfd_create
            *(101, 310, 311),  # ptrace, process_vm_readv, process_vm_writev
            *(155, 161, 165, 166, 272, 308),  # pivot_root, chroot, mount, umount2, unshare, setns
            *(135, 175, 176, 246, 313, 320),  # personality, *_module, kexec_load, kexec_file_load
            *(248, 249, 250),  # add_key, request_key, keyctl
            *(298, 300, 304, 321, 323),  # perf_event_open, fanotify_init, open_by_handle_at, bpf, userfaultfd
        ),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        25,
        (
            *(198, 208),
            *(194, 195, 196, 190, 186, 180, 279),
            *(117, 270, 271),
            *(41, 51, 40, 39, 97, 268),
            *(92, 105, 106, 104, 273, 294),
            *(217, 218, 219),
            *(241, 262, 265, 280, 282),
        ),
    ),
}
MACHINES = tuple(_MACHINES)


def filter_program(machine: str) -> bytes:
    """The filter for `platform.machine()`, one of MACHINES, as an array of the kernel's `struct sock_filter`.

    A refused call fails with EPERM; clone3 with ENOSYS, so that the C library uses clone, of which threads
    are allowed. A call of another architecture ends the program.
    """
    architecture, clone, fcntl, refused = _MACHINES[machine]
    refuse = _ERROR | errno.EPERM
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        *_if(_AT_LEAST, _X32, refuse),
        *_if(_EQUAL, _CLONE3, _ERROR | errno.ENOSYS),
    ]
    for number in (*refused, *_SAME):
        code += _if(_EQUAL, number, refuse)
    code += [
        _step(_EQUAL, fcntl, 0, 4),
        _step(_LOAD, _SECOND_ARGUMENT),
        *_if(_EQUAL, _SETPIPE_SZ, refuse),
        _step(_RETURN, _ALLOW),
        _step(_EQUAL, clone, 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_ANY_BIT, _THREAD, 1, 0),
        _step(_RETURN, refuse),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _if(test: int, value: int, then: int) -> list[bytes]:
    return [_step(test, value, 0, 1), _step(_RETURN, then)]


def _step(operation: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, then, otherwise, value)
