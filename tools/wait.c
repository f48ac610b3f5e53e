/* How idle threads of the engine wait. libgomp spins at the end of a parallel loop for up to some
 * milliseconds; beside other work on the same cores that costs a time slice a loop, and a step of training
 * becomes ten to a hundred times slower. Some microseconds are enough to catch a loop that follows at once.
 *
 * libgomp reads the environment when it is loaded, which is before main: only a function of the program's
 * .preinit_array runs earlier (gABI, "Initialization and Termination Functions"). What the user has set
 * stays. Sanitizers start themselves at that point, so their builds leave it out. */
#include <stdlib.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CKPT_WAIT 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define CKPT_WAIT 0
#endif
#endif

#ifndef CKPT_WAIT
static void spin_briefly(int argc, char **argv, char **envp)
{
    (void)argc, (void)argv, (void)envp;
    if (getenv("OMP_WAIT_POLICY") == NULL) {
        (void)setenv("GOMP_SPINCOUNT", "2000", 0);
    }
}
__attribute__((section(".preinit_array"),
               used)) static void (*const before_libraries)(int, char **, char **) = spin_briefly;
#endif
