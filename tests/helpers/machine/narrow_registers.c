/* Lets User-Mode Linux run on processors with AMX: preloaded into it, this stands before ptrace.
 *
 * The kernel of Debian 12 reads and writes its processes' vector registers with a buffer of 2,696 bytes, which
 * ends with AVX-512's and the protection keys. Where the processor has more, the machine's kernel refuses to
 * write so few, and the guest panics at its first program. Its programs do not use AMX: its registers are
 * read into a larger buffer, and written as unused.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

enum { XSTATE = 0x202, HEADER = 512, LARGEST = 1 << 16 }; /* NT_X86_XSTATE; offset of the features in use */
static const uint64_t KNOWN = 0x3ff;                      /* x87 to the protection keys */

long ptrace(enum __ptrace_request request, ...) {
    static long (*next)(int, int, void *, void *);
    static _Thread_local char buffer[LARGEST];
    if (next == NULL) next = (long (*)(int, int, void *, void *))dlsym(RTLD_NEXT, "ptrace");
    va_list list;
    va_start(list, request);
    int pid = va_arg(list, int);
    void *address = va_arg(list, void *), *data = va_arg(list, void *);
    va_end(list);
    int reads = request == PTRACE_GETREGSET, writes = request == PTRACE_SETREGSET;
    if (!(reads || writes) || (uintptr_t)address != XSTATE) return next((int)request, pid, address, data);

    struct iovec *caller = data, all = {buffer, LARGEST};
    long result = next(PTRACE_GETREGSET, pid, address, &all); /* sets the true size */
    if (result != 0) return result;
    if (caller->iov_len > all.iov_len) caller->iov_len = all.iov_len;
    if (reads) {
        memcpy(caller->iov_base, buffer, caller->iov_len);
        return 0;
    }
    uint64_t used;
    memset(buffer, 0, all.iov_len);
    memcpy(buffer, caller->iov_base, caller->iov_len);
    memcpy(&used, buffer + HEADER, sizeof used);
    used &= KNOWN;
    memcpy(buffer + HEADER, &used, sizeof used);
    return next(PTRACE_SETREGSET, pid, address, &all);
}
