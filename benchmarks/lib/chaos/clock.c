/* Loaded before libfaketime: sleeps stay true. libfaketime 0.9.10 also shifts sleeps until a moment of a clock
   that it was told to leave alone, which then fail with EINVAL.

   cc -shared -fPIC -o clock.so clock.c */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
  int saved = errno;
  int failed = syscall(SYS_clock_nanosleep, clock, flags, until, left) ? errno : 0;
  errno = saved;
  return failed;
}
