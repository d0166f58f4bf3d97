/* Threads for the kernels: those of the OpenMP runtime that torch has loaded, so that there is one pool, not two.
 *
 * No OpenMP pragma is used and none is compiled: any C compiler builds these files, and nothing is linked. The loader
 * hands over three functions of the runtime's documented C interface; LLVM's runtime exports the same ones. Without them
 * every team is one thread.
 *
 * Barrier: a counter and a phase, as in Mellor-Crummey and Scott 1991 (section 3.1, a centralised barrier).
 */
#include "common.h"

#include <sched.h>

typedef void (*parallel_function)(void (*run)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*number_function)(void);

static parallel_function run_parallel;
static number_function thread_number, thread_count;

enum { SPINS = 2000 }; /* some 30 us: longer than a fair share of work differs, shorter than a time slice */

/* GOMP_parallel, omp_get_thread_num and omp_get_num_threads. Called once, before any kernel. */
EXPORT void cbd_use_threads(void *parallel, void *number, void *count) {
    run_parallel = (parallel_function)parallel;
    thread_number = (number_function)number;
    thread_count = (number_function)count;
}

struct call {
    team_part run;
    void *job;
    struct team team;
};

static void enter(void *data) {
    struct call *call = data;
    int part = thread_number();
    /* All of them write the same number, and each has it before it reads it. */
    __atomic_store_n(&call->team.parts, thread_count(), __ATOMIC_RELAXED);
    call->run(call->job, part, &call->team);
}

void team_run(team_part run, void *job, int threads) {
    struct call call = {run, job, {1, 0, 0}};
    if (threads > 1 && run_parallel)
        run_parallel(enter, &call, (unsigned)threads, 0);
    else
        run(job, 0, &call.team);
}

INLINE void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void team_barrier(struct team *team) {
    if (team->parts == 1) return;
    int phase = __atomic_load_n(&team->passed, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->parts) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->passed, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int n = 0; __atomic_load_n(&team->passed, __ATOMIC_ACQUIRE) == phase; n++) {
        if (n < SPINS)
            pause_briefly();
        else
            sched_yield();
    }
}
